"""Times sums over ranks as in the layers: between processes of a host, with work in between."""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from eesd_dist.model.kv_layout import LANES
from eesd_dist.statistics import usual_s
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.rendezvous import build_group, connect_store
from tests.support.host_sum_calls import compile_calls, seconds_of_sums

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
    compile_calls()
    group = build_group(
        connect_store(at, timeout_s=_TIMEOUT_S),
        epoch=0,
        name="sums",
        rank=rank,
        size=num_ranks,
        timeout_s=_TIMEOUT_S,
    )
    medians = []
    for size_bytes in sizes:
        width = -(-size_bytes // (4 * LANES)) * LANES
        times = []
        for _ in range(_REPEATS):
            time.sleep(_PAUSE_S)
            took_s = seconds_of_sums(group, width=width, count=_SUMS, work_s=work_s)
            times.append(took_s / _SUMS - work_s)
        medians.append(round(max(usual_s(times), 1e-7), 9))
    if rank == 0:
        results.send(medians)
    group.all_reduce(torch.zeros(1))  # so that no rank leaves before the others are done
