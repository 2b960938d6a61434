"""Threads as the ranks of a process group, for work that is kept as graphs.

One rank at a time computes, and the others wait in a sum: Triton's interpreter is for one thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.thread_group import ThreadGroup
from tests.support.thread_ranks import on_ranks

T = TypeVar("T")
_COMPUTING = Lock()


class CapturedRanks(ProcessGroup):
    """A rank of a process group that sums and gathers among threads."""

    def __init__(self, threads: ThreadGroup, *, epoch: int = 1, fits_graphs: bool = True) -> None:
        self.watched: list[str] = []
        plane = SimpleNamespace(
            fits_graphs=lambda num_bytes: fits_graphs,
            watch_queued=lambda operation: self.watched.append(operation),
            lost=None,
        )
        super().__init__(
            name="check",
            epoch=epoch,
            rank=threads.rank,
            members=[f"rank {rank}" for rank in range(threads.size)],
            timeout_s=20.0,
            device=torch.device("cpu"),
            gloo=cast(Any, None),
            nccl=cast(Any, plane),
        )
        self.threads = threads

    def all_reduce(self, x: Tensor) -> Tensor:
        with _not_computing():
            return self.threads.all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        with _not_computing():
            return self.threads.all_gather(x)


def on_captured_ranks(
    size: int, work: Callable[[CapturedRanks], T], *, fits_graphs: bool = True
) -> list[T]:
    """Runs `work` on each rank; see `on_ranks`."""

    def run(threads: ThreadGroup) -> T:
        with _COMPUTING:
            return work(CapturedRanks(threads, fits_graphs=fits_graphs))

    return on_ranks(size, run, timeout_s=120.0)


@contextmanager
def _not_computing() -> Iterator[None]:
    _COMPUTING.release()
    try:
        yield
    finally:
        _COMPUTING.acquire()
