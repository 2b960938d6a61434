import asyncio

import pytest

from serve_app.batch.feed import RowFeed, batch_sizes


@pytest.mark.parametrize("num_rows", [1, 7, 100, 1234])
def test_batches_hold_all_rows_and_the_last_ones_are_small(num_rows: int) -> None:
    sizes = batch_sizes(num_rows, batch_size=8, num_slots=6)
    assert sum(sizes) == num_rows
    assert max(sizes) <= 8
    assert sizes[-6:] == [1] * min(6, len(sizes))
    assert sizes == sorted(sizes, reverse=True)


def test_batches_go_to_those_that_ask_and_are_given_out_again_until_they_are_done() -> None:
    async def run() -> None:
        feed = RowFeed()
        waiting = asyncio.ensure_future(feed.get(97))  # tasks come in any order
        await asyncio.sleep(0)
        assert not waiting.done()
        await feed.put(b"first")
        await feed.put(b"second")
        assert await waiting == await feed.get(97) == b"first"
        assert await feed.get(3) == b"second"
        await feed.forget([97])
        assert await feed.get(97) == b""  # of a task that is run again, but was done
        await feed.close()
        assert await feed.get(5) == await feed.get(6) == b""
        assert await feed.get(3) == b"second"

    asyncio.run(run())
