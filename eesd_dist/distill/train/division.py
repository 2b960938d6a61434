"""Divides the rows of a pass over a store among ranks.

The shards of a pass, one after another, are cut into as many equal parts as there are ranks. A rank
reads the shards of its part and no others; a shard across a border is read by the ranks on both
sides, each of which uses only its own rows. So ranks have equally many rows, whatever the sizes of
the shards, and also where there are fewer shards than ranks. Does not depend on files.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Contiguous rows of one shard."""

    shard: int
    rows: range


def divided(shards: Sequence[tuple[int, int]], *, num_ranks: int) -> list[list[Piece]]:
    """Returns the pieces of each rank, for shards given as (number, rows) in the order of the pass.
    All ranks get equally many rows; at most `num_ranks - 1` rows at the end are left out."""
    each = sum(num_rows for _, num_rows in shards) // num_ranks
    return [_part(shards, range(rank * each, (rank + 1) * each)) for rank in range(num_ranks)]


def _part(shards: Sequence[tuple[int, int]], part: range) -> list[Piece]:
    """Returns the pieces within these rows of all shards together."""
    pieces = []
    begin = 0
    for shard, num_rows in shards:
        rows = range(max(part.start - begin, 0), min(part.stop - begin, num_rows))
        if rows:
            pieces.append(Piece(shard=shard, rows=rows))
        begin += num_rows
    return pieces
