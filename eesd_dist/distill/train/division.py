"""Divides the rows of a pass over a store among ranks.

The shards of a pass, one after another, are cut into as many equal parts as there are ranks. A rank
reads the shards of its part and no others; a shard across a border is read by the ranks on both
sides, each of which uses only its own rows. So ranks have equally many rows, whatever the sizes of
the shards, and also where there are fewer shards than ranks. Does not depend on files.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """Contiguous rows of one shard."""

    shard: int
    rows: range


def divided(shards: Sequence[tuple[int, int]], *, num_ranks: int) -> list[list[ShardRows]]:
    """Returns the pieces of each rank, for shards given as (number, rows) in the order of the pass.
    All ranks get equally many rows; at most `num_ranks - 1` rows at the end are left out."""
    rows_per_rank = sum(num_rows for _, num_rows in shards) // num_ranks
    return [
        _part(shards, range(rank * rows_per_rank, (rank + 1) * rows_per_rank))
        for rank in range(num_ranks)
    ]


def _part(shards: Sequence[tuple[int, int]], row_range: range) -> list[ShardRows]:
    """Returns the pieces within these rows of all shards together."""
    rank_rows = []
    begin = 0
    for shard, num_rows in shards:
        rows = range(max(row_range.start - begin, 0), min(row_range.stop - begin, num_rows))
        if rows:
            rank_rows.append(ShardRows(shard=shard, rows=rows))
        begin += num_rows
    return rank_rows
