"""Times sums over ranks as in the layers: between processes of this machine, with work in between.

A rank that has computed since its last sum wakes up later than one that only sums: a tight loop of
sums is faster than the sums of a verify pass, by a third on two CPU cores.
"""

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from eesd_dist.statistics import usual_s
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.rendezvous import build_group, connect_store

_SUMS = 50
"""Sums of one figure, about as many as in a verify pass."""
_REPEATS = 30
_TIMEOUT_S = 60.0
_PAUSE_S = 0.003
"""Between two figures, as between two rounds."""

Times = tuple[tuple[int, float], ...]
"""(bytes, seconds) by increasing size."""


def measure_sums(sizes: Sequence[int], *, num_ranks: int, work_s: float) -> Times:
    """Returns the usual time of a sum of float32 tensors of these sizes in bytes.

    `work_s`: time that a rank computes between two sums, which is not part of the figures.
    """
    host = StoreHost()
    spawned = multiprocessing.get_context("spawn")
    receiver, sender = spawned.Pipe(duplex=False)
    ranks = [
        spawned.Process(
            target=_run_rank,
            args=(host.at, rank, num_ranks, tuple(sizes), work_s, sender),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        if not receiver.poll(_TIMEOUT_S):
            raise TimeoutError(f"{num_ranks} ranks measured no sums within {_TIMEOUT_S:g} s")
        seconds: list[float] = receiver.recv()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return tuple(zip(sizes, seconds, strict=True))


def _run_rank(
    at: Address,
    rank: int,
    num_ranks: int,
    sizes: tuple[int, ...],
    work_s: float,
    results: Connection,
) -> None:
    torch.set_num_threads(1)
    group = build_group(
        connect_store(at, timeout_s=_TIMEOUT_S),
        epoch=0,
        name="sums",
        rank=rank,
        size=num_ranks,
        timeout_s=_TIMEOUT_S,
    )
    work = _Work(work_s)
    medians = []
    for size_bytes in sizes:
        x = torch.zeros(max(size_bytes // 4, 1))
        times = []
        for _ in range(_REPEATS):
            time.sleep(_PAUSE_S)
            started = time.perf_counter()
            for _ in range(_SUMS):
                work.do()
                group.all_reduce(x)
            times.append((time.perf_counter() - started) / _SUMS - work.seconds)
        medians.append(round(max(usual_s(times), 1e-7), 9))
    if rank == 0:
        results.send(medians)
    group.all_reduce(torch.zeros(1))  # so that no rank leaves before the others are done


class _Work:
    """Products that take about so many seconds."""

    def __init__(self, target_s: float) -> None:
        self._x = torch.randn(4, 192)
        self._weight = torch.randn(192, 448)
        once = min(self._once() for _ in range(200))
        self._count = round(target_s / once)
        self.seconds = statistics.median(self._timed() for _ in range(50))

    def do(self) -> None:
        for _ in range(self._count):
            self._x @ self._weight

    def _timed(self) -> float:
        started = time.perf_counter()
        self.do()
        return time.perf_counter() - started

    def _once(self) -> float:
        started = time.perf_counter()
        self._x @ self._weight
        return time.perf_counter() - started
