"""A stage's ranks as threads of this process: a TensorGroup for tests, with no network under it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

WAIT_S = 10.0

Result = TypeVar("Result")


class ThreadGroup:
    """One rank's view; the ranks meet at a barrier and read each other's slot."""

    def __init__(self, *, rank: int, barrier: Barrier, slots: list[Tensor]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._slots = slots

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._slots)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self._slots[self._rank] = x.clone()
        self._barrier.wait(WAIT_S)
        gathered = list(self._slots)
        assert all(part.shape == x.shape for part in gathered), "real groups need equal shapes"
        self._barrier.wait(WAIT_S)
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.all_gather(x)).sum(dim=0)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return self.all_gather(x)[source]


def on_ranks(num_ranks: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """What `work` returns on each rank, in rank order."""
    barrier, slots = Barrier(num_ranks), [torch.empty(0)] * num_ranks
    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = [
            pool.submit(work, ThreadGroup(rank=rank, barrier=barrier, slots=slots))
            for rank in range(num_ranks)
        ]
        return [rank.result() for rank in ranks]
