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
            slot_row = row + kv_slot - segment.start
            position_R[slot_row] = first + len(path) - 1
            if path[-1] == len(path) - 1:  # no other branch comes before: as in a chain
                in_order_R[slot_row] = first + len(path)
                continue
            in_order_R[slot_row] = first
            branch_R[slot_row] = len(branch_slots)
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
