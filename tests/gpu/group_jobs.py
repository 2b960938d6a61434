"""Work of the ranks of a group with sums in CUDA graphs."""

import os
import signal
import time
from collections.abc import Callable

import torch
from torch import Tensor

from eesd_dist.backends.cuda.graphs import Graph
from eesd_dist.errors import PeerLost
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.transport.rank_sums import pairwise_sum
from tests.gpu.ranks import TIMEOUT_S, Figures

_WIDTH = 8192
_SUMS = 8
"""Sums of a graph."""
_DYING_S = 1.0
"""Time for which a rank waits before it dies."""


def captured(group: ProcessGroup, run: Callable[[], None]) -> Callable[[], None]:
    """Returns what replays the graph of this work."""
    graph: Graph[None] = Graph(torch.cuda.graph_pool_handle())
    with group.capturing(graph.cut) as counts:
        graph.capture(run)

    def replay() -> None:
        with group.replaying(counts) as operation:
            graph.replay(operation)

    return replay


def inputs(num_rows: int, seed: int, dtype: torch.dtype, size: int) -> list[Tensor]:
    """Returns the same numbers for each rank on every rank, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_rows, _WIDTH, generator=generator).to(dtype) for _ in range(size)]


def sums_in_graphs(group: ProcessGroup, device: torch.device) -> Figures:
    """Checks sums and gathers against the rule, in memory and over NCCL, with and without graphs;
    returns their times."""
    plane = plane_of(group)
    assert plane._symmetric is not None, "the ranks have no memory of each other"
    first = "memory" if plane._nodes is None else "memory and NCCL"
    figures: Figures = {}
    for path in (first, "NCCL"):
        if path == "NCCL":
            plane._symmetric = None
            plane._nodes = None
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for num_rows in (1, 3, 64, 320) if path == first else (1, 64):
                _check_sum(group, num_rows, dtype, device)
        _check_gather(group, device)
        for num_rows in (1, 8, 64, 320):
            _check_graph(group, num_rows, device)
            if path == first or num_rows == 8:
                queued_us, all_us = _time_of_sum(group, num_rows, device)
                figures[f"{num_rows} rows, {path}, us to queue and in all"] = (queued_us, all_us)
    group.check()
    return figures


def _check_sum(
    group: ProcessGroup, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    summands = inputs(num_rows, num_rows, dtype, group.size)
    expected = pairwise_sum(summands)
    total = group.all_reduce(summands[group.rank].to(device))
    assert torch.equal(total.cpu(), expected), f"another sum of {num_rows} rows x {dtype}"
    row = group.all_reduce(summands[group.rank][-1:].to(device))
    assert torch.equal(row.cpu(), expected[-1:]), f"a row alone of {num_rows} x {dtype} differs"


def _check_gather(group: ProcessGroup, device: torch.device) -> None:
    for num_rows, dtype in ((1, torch.int32), (5, torch.float32), (3, torch.uint8)):
        summands = [
            torch.arange(7 * num_rows).view(num_rows, 7) + 10 * r for r in range(group.size)
        ]
        gathered = group.all_gather(summands[group.rank].to(device, dtype))
        for summand, theirs in zip(summands, gathered, strict=True):
            assert torch.equal(theirs.cpu(), summand.to(dtype)), "another gather"


def _check_graph(group: ProcessGroup, num_rows: int, device: torch.device) -> None:
    """Replays sums of sums, with eager ones between."""
    x = torch.empty(num_rows, _WIDTH, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)

    def twice() -> None:
        once = group.all_reduce(x.clone())
        out.copy_(group.all_reduce(once * (group.rank + 1)))

    x.zero_()
    twice()
    replay = captured(group, twice)
    for turn in range(4):
        summands = inputs(num_rows, 100 + turn, torch.bfloat16, group.size)
        once = pairwise_sum(summands)
        expected = pairwise_sum([once * (rank + 1) for rank in range(group.size)])
        x.copy_(summands[group.rank].to(device))
        replay()
        assert torch.equal(out.cpu(), expected), f"replay {turn} of {num_rows} rows"
        if turn % 2:
            _check_sum(group, 2, torch.bfloat16, device)


def _time_of_sum(group: ProcessGroup, num_rows: int, device: torch.device) -> tuple[float, float]:
    """Returns the microseconds in which the host queues a sum, and those of a sum, of graphs with
    many."""
    x = torch.ones(num_rows, _WIDTH, dtype=torch.bfloat16, device=device)

    def many() -> None:
        for _ in range(_SUMS):
            group.all_reduce(x)

    many()
    replay = captured(group, many)
    replay()
    torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    for _ in range(3):
        replay()
    queued_s = time.perf_counter() - started_s
    torch.cuda.synchronize(device)
    all_s = time.perf_counter() - started_s
    return round(queued_s / (3 * _SUMS) * 1e6, 1), round(all_s / (3 * _SUMS) * 1e6, 1)


def die_before_a_replay(group: ProcessGroup, device: torch.device) -> Figures | None:
    return _die(group, device, replays=0, dies_in=0.0)


def die_during_a_replay(group: ProcessGroup, device: torch.device) -> Figures | None:
    return _die(group, device, replays=0, dies_in=_DYING_S)


def die_between_replays(group: ProcessGroup, device: torch.device) -> Figures | None:
    """Rank 0 has queued more replays than the other one, and waits in the middle."""
    return _die(group, device, replays=2, dies_in=_DYING_S)


def _die(
    group: ProcessGroup, device: torch.device, *, replays: int, dies_in: float
) -> Figures | None:
    """Kills the last rank; the others return the seconds until they noticed."""
    x = torch.ones(8, _WIDTH, dtype=torch.bfloat16, device=device)

    def many() -> None:
        for _ in range(_SUMS):
            group.all_reduce(x)

    many()
    replay = captured(group, many)
    replay()
    group.all_reduce(x)
    torch.cuda.synchronize(device)
    if group.rank == group.size - 1:
        for _ in range(replays):
            replay()
        torch.cuda.synchronize(device)
        time.sleep(dies_in)
        os.kill(os.getpid(), signal.SIGKILL)
    if not dies_in:
        time.sleep(_DYING_S)
    started_s = time.perf_counter()
    is_lost = False
    try:
        for _ in range(replays + 3):
            replay()
    except PeerLost:
        is_lost = True
    torch.cuda.synchronize(device)
    ended_s = time.perf_counter() - started_s
    assert ended_s < TIMEOUT_S + 2.0, f"its kernels ended after {ended_s:.1f} s"
    try:
        group.check()
    except PeerLost:
        is_lost = True
    assert is_lost, "the replays have ended without rank 1"
    assert float(torch.ones(100, device=device).sum()) == 100, "the device is of no use any more"
    return {"noticed after, s": round(ended_s, 2)}


def plane_of(group: ProcessGroup) -> NcclPlane:
    assert group._nccl is not None, "a group of GPUs"
    return group._nccl
