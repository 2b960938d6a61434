"""Plans a forward pass: its rows, the slots of their keys and values, and the keys that each sees.

The plan is made once per pass, for all layers, as arrays over all rows. A row of a chain sees the
KV slots up to its own. A row of a drafted tree sees its ancestors only, in the order of their
positions, so that it is computed with the same sums as at the end of a chain. Depends on positions
and pages only.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from eesd_dist.config import Numerics
from eesd_dist.model.kernels import padded_rows
from eesd_dist.model.kv_layout import NO_ROWS, Ints, RowArrays
from eesd_dist.page_table import PageTable
from eesd_dist.transport.contracts import RowSegment as RowSegment
from eesd_dist.trees import path_to


# Shapes: T rows (padded), R rows, B segments, W pages of the longest table.
class RowPlan:
    """The rows of one forward pass, shared by all its layers."""

    def __init__(
        self, arrays: RowArrays, *, num_padded: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.arrays = arrays
        self.num_rows = len(arrays.position_R)
        self.num_padded = num_padded

    @classmethod
    def build(
        cls,
        segments: Sequence[RowSegment],
        *,
        page_size: int,
        device: torch.device,
        numerics: Numerics,
    ) -> "RowPlan":
        arrays = row_arrays(segments)
        num_padded = padded_rows(len(arrays.position_R), numerics=numerics, device=device)
        return cls(arrays, num_padded=num_padded, page_size=page_size, device=device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[T] position of every row; 0 for padding."""
        position_T = np.zeros(self.num_padded, np.int64)
        position_T[: self.num_rows] = self.arrays.position_R
        return torch.from_numpy(position_T).to(self.device)

    @cached_property
    def on_device(self) -> "DeviceRows":
        """The arrays on a GPU, uploaded together."""
        packed = packed_rows(self.arrays, self.num_rows)
        blocks_B2 = self.long_blocks
        return DeviceRows(
            torch.from_numpy(packed).to(self.device),
            self.num_rows,
            num_parts=num_parts(self.arrays),
            blocks_B2=None if blocks_B2 is None else torch.from_numpy(blocks_B2).to(self.device),
        )

    @cached_property
    def long_blocks(self) -> Ints | None:
        """`chain_blocks`, where most rows are in full ones: a prefill; else None. The drafts of a
        batch are not: their passes have a graph."""
        if self.num_rows < _FEWEST_IN_BLOCKS:
            return None
        blocks_B2 = chain_blocks(self.arrays)
        num_full = int((blocks_B2[:, 1] - blocks_B2[:, 0] == BLOCK_ROWS - 1).sum())
        return blocks_B2 if 2 * BLOCK_ROWS * num_full > self.num_rows else None


class DeviceRows:
    """`packed_rows` on a GPU as views."""

    def __init__(
        self,
        packed: torch.Tensor,
        num_rows: int,
        *,
        num_parts: int,
        blocks_B2: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """`slots`: None if they follow the rows in `packed`."""
        self.num_rows = num_rows
        """With padding."""
        self.num_parts = num_parts
        """At least as many parts as the row with the most keys has."""
        self.blocks_B2 = blocks_B2
        """First and last row of each block of rows that are attended together; None: none are."""
        end, stride = num_packed(num_rows), _aligned(num_rows)
        by_row = packed.narrow(0, 0, end).view(_NUMBERS_PER_ROW, stride)
        self.position_T, self.kv_slot_T, self.in_order_T, self.branch_T, self.table_T = (
            by_row.narrow(1, 0, num_rows)
        )
        self.slots = packed.narrow(0, end, packed.numel() - end) if slots is None else slots
        """KV slots of branches and pages of tables, where `branch_T` and `table_T` say."""


_NUMBERS_PER_ROW = 5


def _aligned(num_rows: int) -> int:
    """Returns a multiple of 16 bytes: Triton compiles once more for numbers at other addresses."""
    return -(-num_rows // 4) * 4


def num_packed(num_rows: int) -> int:
    """Returns how many numbers `packed_rows` has before the slots."""
    return _NUMBERS_PER_ROW * _aligned(num_rows)


PART = 256
"""Keys of one part of a row's keys on a GPU."""
BLOCK_ROWS = 16
_FEWEST_IN_BLOCKS = 64
"""Passes of as many rows may be attended in blocks: rows share loads."""


def num_parts(arrays: RowArrays) -> int:
    """Returns the parts of the row with the most keys, rounded up to a power of four."""
    most = int(arrays.position_R.max(initial=0)) // PART + 1
    return int(4 ** -(-(most - 1).bit_length() // 2))


def chain_blocks(arrays: RowArrays) -> Ints:
    """Returns the first and last row [B, 2] of blocks of consecutive rows of a text's chain. A
    tree's row is a block of its own where it sees other keys than the row before and itself."""
    position_R = arrays.position_R
    follows_R = np.zeros(len(position_R), bool)
    follows_R[1:] = (arrays.table_R[1:] == arrays.table_R[:-1]) & (
        position_R[1:] == position_R[:-1] + 1
    )
    follows_R &= arrays.in_order_R == position_R + 1
    follows_R[1:] &= (arrays.in_order_R == position_R + 1)[:-1]
    start_R = np.flatnonzero(~follows_R)
    lengths = np.diff(np.append(start_R, len(position_R)))
    counts = -(-lengths // BLOCK_ROWS)
    run_B = np.repeat(np.arange(len(start_R)), counts)
    within_B = np.arange(len(run_B)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_B = start_R[run_B] + BLOCK_ROWS * within_B
    last_B = np.minimum(first_B + BLOCK_ROWS, (start_R + lengths)[run_B]) - 1
    return np.stack([first_B, last_B], axis=1).astype(np.int32)


def packed_rows(arrays: RowArrays, num_padded: int) -> Ints:
    """Returns the rows in one array: each row's position, KV slot, keys in order, and where its
    branch and its table begin in what follows. Padding rows are at position and slot -1."""
    num_rows, num_branch = len(arrays.position_R), len(arrays.branch_slots)
    by_row = np.full((_NUMBERS_PER_ROW, _aligned(num_padded)), -1, np.int32)
    by_row[2:, num_rows:] = 0
    by_row[0, :num_rows] = arrays.position_R
    by_row[1, :num_rows] = arrays.kv_slot_R
    by_row[2, :num_rows] = arrays.in_order_R
    by_row[3, :num_rows] = arrays.branch_R
    by_row[4, :num_rows] = arrays.table_R * np.int32(arrays.tables_BW.shape[1]) + num_branch
    return np.concatenate([by_row.ravel(), arrays.branch_slots, arrays.tables_BW.ravel()])


def chain_rows(tables_BW: Ints, table_R: Ints, position_R: Ints) -> RowArrays:
    """Returns rows of chains, by the table and the position of each."""
    return RowArrays(
        tables_BW=tables_BW,
        table_R=table_R,
        position_R=position_R,
        kv_slot_R=position_R,
        in_order_R=position_R + np.int32(1),
        branch_R=np.zeros_like(position_R),
        branch_slots=NO_ROWS.branch_slots,
    )


def row_arrays(segments: Sequence[RowSegment]) -> RowArrays:
    """Returns the rows of all segments in order."""
    if len(segments) == 1 and not segments[0].parents:
        return _chain(segments[0])
    tables_BW = _tables([PageTable.of(segment.pages).array for segment in segments])
    # Lists: a round has a few rows, for which one call of NumPy takes longer.
    table_R = _ints([at for at, segment in enumerate(segments) for _ in range(segment.num_rows)])
    kv_slot_R = _ints([s.start + row for s in segments for row in range(s.num_rows)])
    position_R, in_order_R = kv_slot_R, kv_slot_R + np.int32(1)
    branch_R = np.zeros_like(kv_slot_R)
    branch_slots: list[int] = []
    trees = [at for at, segment in enumerate(segments) if segment.parents and segment.is_tree]
    if trees:
        position_R = position_R.copy()
    for at in trees:
        segment, row = segments[at], sum(s.num_rows for s in segments[:at])
        first = segment.first_drafted
        for kv_slot in range(max(first, segment.start), segment.start + segment.num_rows):
            path = path_to(segment.parents, kv_slot - first)
            place = row + kv_slot - segment.start
            position_R[place] = first + len(path) - 1
            if path[-1] == len(path) - 1:  # no other branch comes before: as in a chain
                in_order_R[place] = first + len(path)
                continue
            in_order_R[place] = first
            branch_R[place] = len(branch_slots)
            branch_slots += [first + node for node in path]
    return RowArrays(
        tables_BW=tables_BW,
        table_R=table_R,
        position_R=position_R,
        kv_slot_R=kv_slot_R,
        in_order_R=in_order_R,
        branch_R=branch_R,
        branch_slots=_ints(branch_slots),
    )


def _chain(segment: RowSegment) -> RowArrays:
    """Returns the rows of a single chain: most rounds, and every drafted token of one request."""
    num_rows = segment.num_rows
    position_R = np.arange(segment.start, segment.start + num_rows, dtype=np.int32)
    zeros_R = np.zeros(num_rows, np.int32)
    return RowArrays(
        tables_BW=_one_table(PageTable.of(segment.pages)),
        table_R=zeros_R,
        position_R=position_R,
        kv_slot_R=position_R,
        in_order_R=position_R + np.int32(1),
        branch_R=zeros_R,
        branch_slots=NO_ROWS.branch_slots,
    )


def _one_table(pages: PageTable) -> Ints:
    """Returns the table [1, W]. Arrays that cannot be written to are copied: Numba would compile
    once more for them."""
    array = pages.array
    return (array if array.flags.writeable else array.copy()).reshape(1, -1)


def _tables(pages: Sequence[Ints]) -> Ints:
    """Returns the tables one below the other, with zeros after their ends."""
    tables_BW = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for at, table in enumerate(pages):
        tables_BW[at, : len(table)] = table
    return tables_BW


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)
