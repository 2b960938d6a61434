import random
from collections.abc import Iterator
from functools import partial

import pytest

from serve_app.batch.order import in_equal_waves, mixed_then_longest
from serve_app.batch.rows import Row

ordered = partial(mixed_then_longest, max_in_flight=8)


def _row(ordinal: int, *, max_tokens: int = 16, prompt: str = "x") -> Row:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return Row(custom_id=str(ordinal), digest="", body=body, ordinal=ordinal)


def _lengths_in_order(lengths: list[int]) -> list[int]:
    rows = [_row(i, max_tokens=length) for i, length in enumerate(lengths)]
    in_order = list(ordered(iter(rows)))
    assert sorted(row.ordinal for row in in_order) == list(range(len(lengths)))
    return [row.max_tokens for row in in_order]


def test_lengths_are_mixed_until_the_long_rows_would_be_the_last_to_end() -> None:
    rng = random.Random(3)
    lengths = _lengths_in_order([rng.choice([8, 64, 512]) for _ in range(600)])
    half, last = lengths[:300], lengths[-20:]
    assert {8, 64, 512} == set(half)
    assert sum(half) == pytest.approx(sum(lengths) / 2, rel=0.2)
    assert last == sorted(last, reverse=True)
    assert last[-8:] == [8] * 8


def test_a_row_that_is_longer_than_all_others_together_comes_first() -> None:
    assert _lengths_in_order([16] * 100 + [4096])[0] == 4096


def test_rows_end_nearly_together_however_their_lengths_are_mixed() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        lengths = _lengths_in_order([int(rng.lognormvariate(4, 1)) + 1 for _ in range(500)])
        ends = [0] * 8  # of what each worker runs
        for length in lengths:
            worker = ends.index(min(ends))
            ends[worker] += length
        assert max(ends) <= max(1.05 * sum(lengths) / 8, max(lengths))


def test_rows_with_the_same_beginning_come_together() -> None:
    prompts = [f"{'ab'[i % 2] * 300} question {i}" for i in range(400)]
    rows = (_row(i, prompt=prompt) for i, prompt in enumerate(prompts))
    beginnings = "".join(str(row.body["prompt"])[0] for row in ordered(rows))
    assert beginnings.count("ab") + beginnings.count("ba") <= 3


def test_no_more_rows_are_read_ahead_than_allowed() -> None:
    num_read = 0

    def rows() -> Iterator[Row]:
        nonlocal num_read
        for i in range(500):
            num_read += 1
            yield _row(i, prompt="x" * 100)

    for limits in ({"max_rows": 20}, {"max_characters": 2000}):
        num_read = 0
        for number, _ in enumerate(ordered(rows(), **limits), start=1):
            assert num_read - number <= 21
        assert number == 500


@pytest.mark.parametrize(
    ("concurrency", "num_rows", "expected"),
    [(64, 200, 50), (64, 10, 10), (64, 64, 64), (64, 65, 33), (64, 100_000, 64), (64, 0, 1)],
)
def test_rows_that_end_together_leave_no_small_last_wave(
    concurrency: int, num_rows: int, expected: int
) -> None:
    assert in_equal_waves(concurrency, num_rows) == expected
