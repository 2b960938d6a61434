"""Rows of tensors that are cut and joined when they are needed."""

# Shapes: T rows, X channels.

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eesd_dist.devices import backend_of
from eesd_dist.types import Value

_FEW = 3
"""Number of slices of each tensor beyond which one gathering copy is faster than a copy of each."""


class RowSlice(Value, frozen=True, eq=False):
    """Some rows of a tensor, which is cut only when they are needed: a slice of a tensor takes ten
    times as long to make."""

    source: Tensor
    first: int
    end: int

    @classmethod
    def all_of(cls, rows_TX: Tensor) -> "RowSlice":
        return cls(rows_TX, 0, rows_TX.shape[0])

    @property
    def count(self) -> int:
        return self.end - self.first

    @property
    def tensor(self) -> Tensor:
        return self.source[self.first : self.end]


def joined(slices: Sequence[RowSlice]) -> Tensor:
    """Returns all rows in order; without a copy if they are side by side in one tensor."""
    rows = _one_slice(slices)
    is_whole = rows.first == 0 and rows.end == rows.source.shape[0]
    return rows.source if is_whole else rows.tensor


def _one_slice(slices: Sequence[RowSlice]) -> RowSlice:
    """Returns all rows in order as one slice, as `joined`."""
    if len(slices) == 1:
        return slices[0]
    merged: list[RowSlice] = []
    for row_slice in slices:
        last = merged[-1] if merged else None
        if last is not None and row_slice.source is last.source and row_slice.first == last.end:
            merged[-1] = RowSlice(last.source, last.first, row_slice.end)
        else:
            merged.append(row_slice)
    return merged[0] if len(merged) == 1 else RowSlice.all_of(_copied(merged))


def _copied(merged: Sequence[RowSlice]) -> Tensor:
    sources = {id(row_slice.source): row_slice.source for row_slice in merged}
    if len(merged) <= _FEW * len(sources):
        return torch.cat([row_slice.tensor for row_slice in merged])
    first_of: dict[int, int] = {}
    num_rows = 0
    for name, source in sources.items():
        first_of[name] = num_rows
        num_rows += source.shape[0]
    rows: list[int] = []
    for row_slice in merged:
        first = first_of[id(row_slice.source)]
        rows.extend(range(first + row_slice.first, first + row_slice.end))
    sources_TX = torch.cat(list(sources.values()))
    return sources_TX.index_select(0, uploaded(rows, sources_TX.device))


class UploadBackend(Protocol):
    """Part of a backend that an upload uses."""

    def uploaded(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """Returns `uploaded`."""
        ...


def uploaded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns int64 numbers on a device, without a wait for what is queued there."""
    backend: UploadBackend = backend_of(device).engine
    return backend.uploaded(numbers, device)
