"""Calls a compiled function in one or more threads, each with its part of the work."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from eesd_dist.backends.cpu.kernels.threads import NUM_COUNTERS

_WORTH_A_THREAD = 1 << 21
"""Products per thread and call: below, a thread costs more than it saves."""
_no_counters = np.zeros(NUM_COUNTERS, np.int64)
_own = threading.local()
"""The pool of the calling thread: the parts of two ranks in one process may wait for each other."""
_MOST_THREADS = 256


class KernelClock:
    """Seconds that this process has spent in calls of compiled functions."""

    spent_s = 0.0


kernel_clock = KernelClock()


def threads_for(num_products: int) -> int:
    """Returns how many threads to use; no result depends on it."""
    return max(1, min(torch.get_num_threads(), num_products // _WORTH_A_THREAD))


def call_in_threads(function: Callable[..., None], num_threads: int, *args: object) -> None:
    """Calls function(*args, counters, part, num_threads) for every part."""
    began_s = time.perf_counter()
    if num_threads == 1:
        function(*args, _no_counters, 0, 1)
    else:
        _call_in_pool(function, num_threads, *args)
    kernel_clock.spent_s += time.perf_counter() - began_s


def _call_in_pool(function: Callable[..., None], num_threads: int, *args: object) -> None:
    counters = np.zeros(NUM_COUNTERS, np.int64)
    waiting = [
        _pool().submit(function, *args, counters, thread, num_threads)
        for thread in range(1, num_threads)
    ]
    function(*args, counters, 0, num_threads)
    for task in waiting:
        task.result()


def _pool() -> ThreadPoolExecutor:
    """Returns the pool of this thread. It starts threads when they are needed, and ends with this
    one."""
    pool: ThreadPoolExecutor | None = getattr(_own, "pool", None)
    if pool is None:
        pool = _own.pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="kernel")
    return pool
