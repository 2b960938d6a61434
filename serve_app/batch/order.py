"""The order in which rows are run: those with the same beginning together, and in the end the long
ones first.

The last rows of a job run in a batch that thins; if they are the short ones, it thins quickly. Up
to there lengths are mixed, as they come: a batch of the longest rows alone would need the most
pages. Rows with the same beginning reuse each other's keys and values. The order needs no more than
a bounded number of rows ahead.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from zlib import crc32

from serve_app.batch.rows import Row

_MAX_ROWS = 4096
_MAX_CHARACTERS = 32 * 2**20
_STEPS_PER_OCTAVE = 2
"""Rows of nearly the same cost are of one class, in which equal beginnings come together."""


def mixed_then_longest(
    rows: Iterator[Row],
    *,
    max_in_flight: int,
    max_rows: int = _MAX_ROWS,
    max_characters: int = _MAX_CHARACTERS,
) -> Iterator[Row]:
    """Yields the rows. `max_in_flight`: rows that are run at a time; `max_rows`, `max_characters`:
    limits of what is read ahead."""
    heap: list[tuple[tuple[int, int], Row]] = []
    num_characters = 0
    for row in rows:
        num_characters += row.num_characters
        heapq.heappush(heap, ((_beginning(row), row.ordinal), row))
        while len(heap) > max_rows or num_characters > max_characters:
            row = heapq.heappop(heap)[1]
            num_characters -= row.num_characters
            yield row
    yield from _last_rows([row for _, row in sorted(heap)], max_in_flight)


def _last_rows(rows: Sequence[Row], max_in_flight: int) -> Iterator[Row]:
    """Yields these rows in their order; but the longest one before what is left besides it takes
    less time than the row itself."""
    waiting = {row.ordinal: row for row in rows}
    longest = deque(sorted(rows, key=_rank))
    cost = sum(map(_cost, rows))
    while waiting:
        while longest[0].ordinal not in waiting:
            longest.popleft()
        is_due = (max_in_flight + 1) * _cost(longest[0]) >= cost
        row = longest[0] if is_due else next(iter(waiting.values()))
        del waiting[row.ordinal]
        cost -= _cost(row)
        yield row


def in_equal_waves(concurrency: int, num_rows: float) -> int:
    """Returns how many rows to run at a time, at most `concurrency`: where all rows take the same
    time, they end in waves, and a small last one would leave an engine nearly idle."""
    num_waves = max(1, math.ceil(num_rows / concurrency))
    return max(1, math.ceil(num_rows / num_waves))


def _cost(row: Row) -> float:
    return max(1.0, row.num_expected_tokens)


def _rank(row: Row) -> tuple[int, int, int]:
    return (-round(_STEPS_PER_OCTAVE * math.log2(_cost(row))), _beginning(row), row.ordinal)


def _beginning(row: Row) -> int:
    return crc32(row.prefix.encode(errors="backslashreplace"))  # allows half surrogates
