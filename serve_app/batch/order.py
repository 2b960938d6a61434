"""The order in which rows are run: long ones first, and those with the same beginning together.

The last rows of a job run in a batch that thins; if they are the short ones, it thins quickly. Rows
with the same beginning reuse each other's keys and values. The order needs no more than a bounded
number of rows ahead.
"""

import heapq
import math
from collections.abc import Iterator

from serve_app.batch.rows import Row

_MAX_ROWS = 4096
_MAX_CHARACTERS = 32 * 2**20
_STEPS_PER_OCTAVE = 2
"""Rows of nearly the same cost are of one class, in which equal beginnings come together."""


def longest_first(
    rows: Iterator[Row], *, max_rows: int = _MAX_ROWS, max_characters: int = _MAX_CHARACTERS
) -> Iterator[Row]:
    """Yields the rows, always the most expensive one of those that were read ahead."""
    heap: list[tuple[tuple[int, int, int], Row]] = []
    num_characters = 0
    for row in rows:
        num_characters += row.num_characters
        heapq.heappush(heap, (_rank(row), row))
        while len(heap) > max_rows or num_characters > max_characters:
            row = heapq.heappop(heap)[1]
            num_characters -= row.num_characters
            yield row
    while heap:
        yield heapq.heappop(heap)[1]


def in_equal_waves(concurrency: int, num_rows: float) -> int:
    """Returns how many rows to run at a time, at most `concurrency`: where all rows take the same
    time, they end in waves, and a small last one would leave an engine nearly idle."""
    num_waves = max(1, math.ceil(num_rows / concurrency))
    return max(1, math.ceil(num_rows / num_waves))


def _rank(row: Row) -> tuple[int, int, int]:
    cost = max(1.0, row.num_expected_tokens)
    return (-round(_STEPS_PER_OCTAVE * math.log2(cost)), hash(row.prefix), row.ordinal)
