"""Divides the rows of a pass among the programs of a GPU's attention, and packs both for an upload.

The rows of a tile are consecutive rows of one text's chain, which share the loads of its keys. A
tree's row has a tile of its own where it sees other keys than the row before it and itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from eesd_dist.model.kv_layout import Ints, RowArrays

PART_BLOCKS = 4
"""Blocks of keys of a part: their sums are merged before those of the next part."""
MOST_QUERIES = 64
_QUERIES = (16, MOST_QUERIES)
"""Queries of a program: rows times the query heads of a KV head, padded. Each is compiled for
every way to divide the keys."""
SPLIT_TILES = 32
"""Most tiles of a pass that divides the keys of each among programs: more fill a GPU alone."""
_SINGLE_BLOCKS = 32
"""Most blocks of keys of all divided tiles that have a program each; more are divided by parts."""
_MOST_SPLIT_ROWS = 1 << 14
"""Most rows times splits: each has a float32 row of every query head in memory. Reached by 64 rows
of 131,072 keys; with more rows of that length one program attends the keys of a tile."""
NUMBERS_PER_TILE = 8
_NUMBERS_PER_ROW = 3


class Tiling(NamedTuple):
    """Properties of a pass that its launches depend on, apart from the values of its arrays."""

    num_tiles: int
    """Number of tiles with padding."""
    rows: int
    """Most rows of a tile."""
    num_splits: int = 1
    """Programs of a tile and KV head."""
    split_blocks: int = 0
    """Blocks of keys of such a program; 0: one program attends all keys."""


# Shapes: R rows, B tiles.
class RowTiles(NamedTuple):
    """The tiles of a pass."""

    tiling: Tiling
    first_B: Ints
    """First row."""
    last_B: Ints


def tiles_of(
    arrays: RowArrays, *, queries_per_kv: int, keys: int, counts: Sequence[int] = ()
) -> RowTiles:
    """Returns as few tiles as there can be. `keys`: of a block; `counts`: numbers of tiles that
    launches are made for, ascending, the next larger of which is taken."""
    start_C, length_C = _chains(arrays)
    longest = int(length_C.max(initial=1))
    sizes = [max(1, queries // queries_per_kv) for queries in _QUERIES]
    rows = next((size for size in sizes if size >= longest), sizes[-1])
    if longest <= rows:
        first_B, last_B = start_C, start_C + length_C - 1
    else:
        count_C = -(-length_C // rows)
        chain_B = np.repeat(np.arange(len(start_C)), count_C)
        at_B = np.arange(len(chain_B)) - np.repeat(np.cumsum(count_C) - count_C, count_C)
        first_B = (start_C[chain_B] + rows * at_B).astype(np.int32)
        last_B = np.minimum(first_B + rows, (start_C + length_C)[chain_B]) - np.int32(1)
    num_tiles = _padded(len(first_B), counts)
    num_blocks = int(arrays.position_R.max(initial=0)) // keys + 1
    if len(first_B) > SPLIT_TILES or num_blocks == 1:
        return RowTiles(Tiling(num_tiles, rows), first_B, last_B)
    split_blocks = 1 if len(first_B) * num_blocks <= _SINGLE_BLOCKS else PART_BLOCKS
    if num_blocks <= split_blocks:  # one program would have all of them
        return RowTiles(Tiling(num_tiles, rows), first_B, last_B)
    num_splits = _power_of_four(-(-num_blocks // split_blocks))
    if num_splits * len(arrays.position_R) > _MOST_SPLIT_ROWS:
        return RowTiles(Tiling(num_tiles, rows), first_B, last_B)
    return RowTiles(Tiling(num_tiles, rows, num_splits, split_blocks), first_B, last_B)


def single_tiles(arrays: RowArrays, *, counts: Sequence[int] = ()) -> RowTiles:
    """Returns a tile for each row, with one program for all its keys."""
    row_R = np.arange(len(arrays.position_R), dtype=np.int32)
    return RowTiles(Tiling(_padded(len(row_R), counts), 1), row_R, row_R)


def _padded(num_tiles: int, counts: Sequence[int]) -> int:
    return next((count for count in counts if count >= num_tiles), num_tiles)


def _chains(arrays: RowArrays) -> tuple[Ints, Ints]:
    """Returns the first row and the number of rows of each run of a text's chain."""
    position_R = arrays.position_R
    if len(position_R) == len(arrays.tables_BW):  # a row of each text, as in most rounds
        return np.arange(len(position_R), dtype=np.int32), np.ones(len(position_R), np.int32)
    is_chain_R = arrays.in_order_R == position_R + 1
    follows_R = np.zeros(len(position_R), bool)
    follows_R[1:] = (
        (arrays.table_R[1:] == arrays.table_R[:-1])
        & (position_R[1:] == position_R[:-1] + 1)
        & is_chain_R[1:]
        & is_chain_R[:-1]
    )
    start_C = np.flatnonzero(~follows_R).astype(np.int32)
    end_C = np.append(start_C[1:], np.int32(len(position_R)))
    return start_C, end_C - start_C


def _power_of_four(count: int) -> int:
    """Returns the smallest power of four that is not smaller."""
    return int(4 ** -(-(count - 1).bit_length() // 2))


class DeviceRows:
    """`packed_rows` on a GPU as views."""

    def __init__(
        self,
        packed: torch.Tensor,
        num_rows: int,
        tiling: Tiling,
        *,
        slots: torch.Tensor | None = None,
    ) -> None:
        """`slots`: None if they follow the rows in `packed`."""
        self.num_rows = num_rows
        """Number of rows with padding."""
        self.tiling = tiling
        stride, end = _aligned(num_rows), num_packed(num_rows, tiling.num_tiles)
        by_row = packed.narrow(0, 0, _NUMBERS_PER_ROW * stride).view(_NUMBERS_PER_ROW, stride)
        self.position_T, self.kv_slot_T, self.table_T = by_row.narrow(1, 0, num_rows)
        self.tiles_B8 = packed[_NUMBERS_PER_ROW * stride : end]
        self.slots = packed.narrow(0, end, packed.numel() - end) if slots is None else slots
        """KV slots of branches and pages of tables, where tiles and `table_T` say."""


def _aligned(num_rows: int) -> int:
    """Returns a multiple of 16 bytes: Triton compiles once more for numbers at other addresses."""
    return -(-num_rows // 4) * 4


def num_packed(num_rows: int, num_tiles: int) -> int:
    """Returns how many numbers `packed_rows` has before the slots."""
    return _NUMBERS_PER_ROW * _aligned(num_rows) + NUMBERS_PER_TILE * num_tiles


def packed_rows(arrays: RowArrays, tiles: RowTiles, num_padded: int) -> Ints:
    """Returns rows and tiles in one array. Of each row its position, KV slot and where its table
    begins in what follows; padding is at position and slot -1. Of each tile the numbers that
    `attend_kernel` reads; padding has no rows. Then the slots."""
    num_rows, num_branch = len(arrays.position_R), len(arrays.branch_slots)
    table_R = arrays.table_R * np.int32(arrays.tables_BW.shape[1]) + np.int32(num_branch)
    by_row = np.full((_NUMBERS_PER_ROW, _aligned(num_padded)), -1, np.int32)
    by_row[0, :num_rows] = arrays.position_R
    by_row[1, :num_rows] = arrays.kv_slot_R
    by_row[2, :num_rows] = table_R
    by_row[2, num_rows:] = 0
    first_B, last_B = tiles.first_B, tiles.last_B
    by_tile = np.zeros((tiles.tiling.num_tiles, NUMBERS_PER_TILE), np.int32)
    by_tile[len(first_B) :, 3] = -1
    by_tile[: len(first_B), :7] = np.stack(
        [
            first_B,
            last_B - first_B + 1,
            arrays.position_R[first_B],
            arrays.position_R[last_B],
            arrays.in_order_R[last_B],
            arrays.branch_R[last_B],
            table_R[last_B],
        ],
        axis=1,
    )
    return np.concatenate(
        [by_row.ravel(), by_tile.ravel(), arrays.branch_slots, arrays.tables_BW.ravel()]
    )
