"""Threads as the ranks of a process group, for work that is kept as graphs.

The plane is NCCL's, over a communicator between threads; its sums in the memory of a node are
theirs, too. One rank at a time computes, and the others wait in a sum: Triton's interpreter is for
one thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.transport.thread_group import ThreadGroup, thread_group
from tests.support.recorded_graphs import RecordedGraph, launch, recorded_graphs
from tests.support.thread_ranks import on_ranks

T = TypeVar("T")
_COMPUTING = Lock()
_TIMEOUT_S = 120.0
"""Ranks compute one after the other: each waits while the others compile and compute."""
_DEVICE = torch.device("cpu", 0)
"""A device with an index, as a plane needs one."""
_DONE = SimpleNamespace(wait=lambda timeout=None: None, is_completed=lambda: True)


class _Threads(ThreadGroup):
    """Threads that let another one compute while they wait."""

    def _exchange(self, x: Tensor, *, kind: str) -> list[Tensor]:
        _COMPUTING.release()
        try:
            return super()._exchange(x, kind=kind)
        finally:
            _COMPUTING.acquire()


def _threads(group: ThreadGroup) -> _Threads:
    return _Threads(rank=group.rank, meeting=group._meeting, in_memory=False)


class _Communicator:
    """Implements what a plane calls of torch's NCCL backend, between threads."""

    Options = SimpleNamespace

    def __init__(self, threads: Any, rank: int, size: int, options: object) -> None:
        assert (threads.rank, threads.size) == (rank, size)
        self._threads: ThreadGroup = threads

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self._threads.all_reduce(tensors[0])
        return _DONE

    def _allgather_base(self, output: Tensor, input: Tensor) -> Any:
        output.copy_(torch.stack(self._threads.all_gather(input)))
        return _DONE

    def alltoall_base(self, output: Tensor, input: Tensor, *_: object) -> Any:
        own = self._threads.rank
        output.copy_(torch.stack([rows[own] for rows in self._threads.all_gather(input)]))
        return _DONE

    def abort(self) -> None:
        self._threads.abort()


class _NodeSums:
    """Sums as `SymmetricSums` does, between threads: work that a graph can hold."""

    def __init__(self, threads: ThreadGroup) -> None:
        self._threads = threads

    def fits(self, x: Tensor) -> bool:
        return x.is_floating_point()

    def fits_gather(self, x: Tensor) -> bool:
        return True

    def sum(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        total = torch.empty_like(x, dtype=dtype)
        launch(lambda: total.copy_(self._threads.all_reduce(x.to(total.dtype, copy=True))))
        return total

    def gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self._threads.size, *x.shape))
        launch(lambda: gathered.copy_(torch.stack(self._threads.all_gather(x))))
        return gathered

    def abort(self) -> None:
        self._threads.abort()


class _Plane(NcclPlane):
    """Records what is given a deadline."""

    def __init__(self, threads: ThreadGroup) -> None:
        self.watched: list[str] = []
        super().__init__(
            cast(Any, threads),
            rank=threads.rank,
            size=threads.size,
            timeout_s=_TIMEOUT_S,
            join_timeout_s=_TIMEOUT_S,
            device=_DEVICE,
        )

    def watch_queued(self, *, operation: str) -> None:
        self.watched.append(operation)


class Placement(NamedTuple):
    """Threads that a rank sums with."""

    everyone: ThreadGroup
    in_node: ThreadGroup | None = None
    """None: all sums are NCCL's."""
    over_nodes: ThreadGroup | None = None
    """Threads at the same place of other nodes, in the order of the nodes."""


class CapturedRanks(ProcessGroup):
    """A rank of a process group with NCCL's plane."""

    def __init__(self, placement: Placement, *, epoch: int = 1) -> None:
        everyone = placement.everyone
        self.plane = _Plane(everyone)
        if placement.over_nodes is not None:
            assert placement.in_node is not None
            self.plane.sum_over_nodes(
                cast(Any, _NodeSums(placement.in_node)),
                cast(Any, placement.over_nodes),
                node=placement.over_nodes.rank,
                num_nodes=placement.over_nodes.size,
                timeout_s=_TIMEOUT_S,
            )
        elif placement.in_node is not None:
            self.plane.sum_in_memory(cast(Any, _NodeSums(placement.in_node)))
        super().__init__(
            name="check",
            epoch=epoch,
            rank=everyone.rank,
            members=[f"rank {rank}" for rank in range(everyone.size)],
            timeout_s=_TIMEOUT_S,
            device=_DEVICE,
            links=cast(Any, SimpleNamespace(abort=lambda: None)),
            nccl=self.plane,
        )
        self.placement = placement

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._on_device("all_reduce") as plane:
            return plane.all_reduce(x, operation="all_reduce")

    def all_gather(self, x: Tensor) -> list[Tensor]:
        with self._on_device("all_gather") as plane:
            return list(plane.all_gather(x, operation="all_gather").unbind())


def on_captured_ranks(
    size: int,
    work: Callable[[CapturedRanks], T],
    *,
    per_node: int | None = None,
    graph: type[RecordedGraph] = RecordedGraph,
) -> list[T]:
    """Runs `work` on each rank; see `on_ranks`. `per_node`: ranks of a node, which sum in its
    memory first; None: all sums are NCCL's."""
    in_node = over_nodes = [None] * size
    if per_node is not None:
        num_nodes = size // per_node
        nodes = [thread_group(per_node, timeout_s=_TIMEOUT_S) for _ in range(num_nodes)]
        in_node = [nodes[rank // per_node][rank % per_node] for rank in range(size)]
        if num_nodes > 1:
            places = [thread_group(num_nodes, timeout_s=_TIMEOUT_S) for _ in range(per_node)]
            over_nodes = [places[rank % per_node][rank // per_node] for rank in range(size)]

    def run(threads: ThreadGroup) -> T:
        groups = (threads, in_node[threads.rank], over_nodes[threads.rank])
        placement = Placement(*(group and _threads(group) for group in groups))
        with _COMPUTING:
            return work(CapturedRanks(placement))

    with _no_gpu(), recorded_graphs(graph):
        return on_ranks(size, run, timeout_s=_TIMEOUT_S)


@contextmanager
def _no_gpu() -> Iterator[None]:
    with (
        patch.object(_distributed_c10d, "ProcessGroupNCCL", _Communicator, create=True),
        patch.object(torch.cuda, "set_device", lambda device: None),
        patch.object(torch.cuda, "Stream", lambda device: None),
    ):
        yield
