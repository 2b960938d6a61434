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


def test_a_batch_is_waited_for_and_given_out_again_until_it_is_done() -> None:
    async def run() -> None:
        feed = RowFeed()
        waiting = asyncio.ensure_future(feed.get(3))
        await asyncio.sleep(0)
        assert not waiting.done()
        await feed.put(3, b"rows")
        assert await waiting == await feed.get(3) == b"rows"
        await feed.forget([3, 4])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(feed.get(3), timeout=0.01)

    asyncio.run(run())
