"""Rows of tensors that are cut and joined when they are needed."""

# Shapes: T rows, X channels.

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_dist.types import Value

_NUM_STAGING = 4
"""Pieces of pinned memory per thread, so that a write waits for an upload long before it."""
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


class _Staging(threading.local):
    """Pinned memory of one thread, kept: getting some takes a millisecond."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None] * _NUM_STAGING
        self._uploaded: list[torch.cuda.Event | None] = [None] * _NUM_STAGING
        self._next = 0

    def upload(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        at, self._next = self._next, (self._next + 1) % _NUM_STAGING
        event, buffer = self._uploaded[at], self._buffers[at]
        if event is not None:
            event.synchronize()  # before the memory is written again
        if buffer is None or len(buffer) < len(numbers):
            size = max(1024, 2 * len(numbers))
            self._buffers[at] = buffer = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        pinned = buffer.narrow(0, 0, len(numbers))
        pinned.numpy()[:] = numbers
        numbers_N = pinned.to(device, non_blocking=True)
        self._uploaded[at] = torch.cuda.current_stream(numbers_N.device).record_event()
        return numbers_N


_STAGING = _Staging()


def uploaded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns int64 numbers on a device. On a GPU from pinned memory: a copy from other memory
    waits until the GPU has done all that is queued."""
    if device.type == "cuda" and torch.cuda.is_available():
        return _STAGING.upload(numbers, device)
    return torch.tensor(numbers, device=device)
