"""Times calls of one device, each alone."""

import time
from collections.abc import Callable, Sequence

import torch

from eesd_dist.statistics import usual_s


def usual_call_s(
    calls: Sequence[Callable[[], object]], device: torch.device, *, repeats: int
) -> float:
    """Returns the usual time of one call: they run one after the other between two readings of the
    clock."""
    times: list[float] = []
    for _ in range(repeats):
        _synchronize(device)
        started_s = time.perf_counter()
        for call in calls:
            call()
        _synchronize(device)
        times.append((time.perf_counter() - started_s) / len(calls))
    return usual_s(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
