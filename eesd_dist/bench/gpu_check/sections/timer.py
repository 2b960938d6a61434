"""Measures device work: medians over many runs, with events on a GPU.

A GPU works asynchronously: `device_s` is the time between events around the work, `host_s` the time
of the call on the host. If both are equal, the device waits for the host.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

_MOST_REPEATS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians, in seconds."""

    device_s: float
    host_s: float

    @property
    def device_ms(self) -> float:
        return 1e3 * self.device_s


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_of(
    run: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float,
    warm_ups: int = 3,
    fewest: int = 5,
) -> Timing:
    """Times `run`, repeated for about `budget_s` after the warm-up, at least `fewest` times."""
    for _ in range(warm_ups):
        run()
    synchronize(device)
    taken: list[tuple[float, float]] = []
    began_s = time.perf_counter()
    while len(taken) < fewest or (
        len(taken) < _MOST_REPEATS and time.perf_counter() - began_s < budget_s
    ):
        taken.append(_once(run, device))
    device_s, host_s = zip(*taken, strict=True)
    return Timing(device_s=statistics.median(device_s), host_s=statistics.median(host_s))


def _once(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        started_s = time.perf_counter()
        run()
        took_s = time.perf_counter() - started_s
        return took_s, took_s
    before, after = _event(), _event()
    torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    before.record()
    run()
    host_s = time.perf_counter() - started_s
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after) / 1e3, host_s


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_rates(device: torch.device, *, budget_s: float) -> dict[int, float]:
    """Returns bytes per second, read plus written, of device-to-device copies by size.

    The sizes are larger than a GPU's L2 cache, and the content is random.
    """
    sizes = (1 << 28, 1 << 30, 1 << 32) if device.type == "cuda" else (1 << 26,)
    rates: dict[int, float] = {}
    for size in sizes:
        if device.type == "cuda" and 3 * size > torch.cuda.mem_get_info(device)[0]:
            break
        source = torch.randint(-(1 << 30), 1 << 30, (size // 4,), device=device, dtype=torch.int32)
        target = torch.empty_like(source)
        timing = time_of(partial(target.copy_, source), device, budget_s=budget_s / 3)
        rates[size] = 2 * size / timing.device_s
    return rates
