"""Compiled calls that only sum over ranks, or only choose among their best tokens."""

import time
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.cpu.calls import call_in_threads
from eesd_dist.backends.cpu.kernels.rank_sums import best_over_ranks, sum_over_ranks
from eesd_dist.backends.cpu.kernels.threads import NUM_COUNTERS
from eesd_dist.backends.cpu.kernels.words import monotonic_ns
from eesd_dist.transport.group_handles import HostGroup
from eesd_dist.transport.thread_group import thread_group


@numba.njit(nogil=True, error_model="numpy")
def _sum(sums, rows_at, row_bytes, width, num_rows, counters, thread, num_threads):  # type: ignore[no-untyped-def]
    sum_over_ranks(sums, rows_at, row_bytes, width, num_rows, counters, thread, num_threads)


@numba.njit(nogil=True, error_model="numpy")
def _best(sums, tokens_S, scores_2S):  # type: ignore[no-untyped-def]
    best_over_ranks(sums, tokens_S, scores_2S, len(tokens_S))


@numba.njit(nogil=True, error_model="numpy")
def _sums_with_work(sums, row_at, width, count, work_ns, counters):  # type: ignore[no-untyped-def]
    for _ in range(count):
        began_ns = monotonic_ns()
        while monotonic_ns() - began_ns < work_ns:
            pass
        sum_over_ranks(sums, row_at, 4 * width, width, 1, counters, 0, 1)


def compile_calls() -> None:
    """Compiles, which takes longer than the shortest deadlines."""
    (single_rank,) = thread_group(1)
    summed(single_rank, torch.zeros(1, 16))
    seconds_of_sums(single_rank, width=16, count=1, work_s=0.0)


def seconds_of_sums(group: HostGroup, *, width: int, count: int, work_s: float) -> float:
    """Returns the seconds of so many sums of a row, with work before each."""
    row_D = torch.zeros(width)
    began_s = time.perf_counter()
    counters = np.zeros(NUM_COUNTERS, np.int64)
    work_ns = int(work_s * 1e9)
    _sums_with_work(group.host_sums.call, row_D.data_ptr(), width, count, work_ns, counters)
    took_s = time.perf_counter() - began_s
    group.finish_sums()
    return took_s


def summed(group: HostGroup, x_TD: Tensor, *, num_threads: int = 1) -> Tensor:
    """Returns the sum of every rank's rows [T, D] float32. Raises PeerLost."""
    total_TD = x_TD.clone(memory_format=torch.contiguous_format)
    num_rows, width = total_TD.shape
    row_bytes = width * total_TD.itemsize
    sums = group.host_sums.call
    arguments = (sums, total_TD.data_ptr(), row_bytes, width, num_rows)
    call_in_threads(_sum, num_threads, *arguments)
    group.finish_sums()
    return total_TD


def best(group: HostGroup, tokens_S: Any, scores_2S: Any) -> tuple[Any, Any]:
    """Returns the best tokens [S] and the best two scores [2, S] of all ranks."""
    tokens_S, scores_2S = tokens_S.copy(), np.ascontiguousarray(scores_2S.copy())
    _best(group.host_sums.call, tokens_S, scores_2S)
    group.finish_sums()
    return tokens_S, scores_2S
