import random
from collections.abc import Iterator

import pytest

from serve_app.batch.order import in_equal_waves, longest_first
from serve_app.batch.rows import Row


def _row(ordinal: int, *, max_tokens: int = 16, prompt: str = "x") -> Row:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return Row(custom_id=str(ordinal), digest="", body=body, ordinal=ordinal)


def test_the_most_expensive_rows_come_first_and_the_cheap_ones_last() -> None:
    lengths = [random.Random(3).choice([8, 64, 512]) for _ in range(300)]
    rows = (_row(i, max_tokens=length) for i, length in enumerate(lengths))
    ordered = [row.body["max_tokens"] for row in longest_first(rows)]
    assert ordered == sorted(lengths, reverse=True)


def test_rows_with_the_same_beginning_come_together() -> None:
    prompts = [f"{'ab'[i % 2] * 300} question {i}" for i in range(40)]
    rows = (_row(i, prompt=prompt) for i, prompt in enumerate(prompts))
    beginnings = [str(row.body["prompt"])[0] for row in longest_first(rows)]
    assert "".join(beginnings) in {"a" * 20 + "b" * 20, "b" * 20 + "a" * 20}


def test_no_more_rows_are_read_ahead_than_allowed() -> None:
    num_read = 0

    def rows() -> Iterator[Row]:
        nonlocal num_read
        for i in range(500):
            num_read += 1
            yield _row(i, prompt="x" * 100)

    for limits in ({"max_rows": 20}, {"max_characters": 2000}):
        num_read = 0
        for number, _ in enumerate(longest_first(rows(), **limits), start=1):
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
