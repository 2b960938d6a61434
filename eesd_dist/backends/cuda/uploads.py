"""Copies numbers to a GPU through pinned memory: from other memory, a copy waits until the GPU has
done all that is queued."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_NUM_STAGING = 4
"""Pieces of pinned memory per thread, so that a write waits for an upload long before it."""


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
    """Returns int64 numbers on a GPU; where there is none, as in tests, by a copy."""
    if torch.cuda.is_available():
        return _STAGING.upload(numbers, device)
    return torch.tensor(numbers, device=device)
