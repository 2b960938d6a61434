"""Waits for processes, and ends them."""

import time
from collections.abc import Iterable
from contextlib import suppress

from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

_POLL_S = 0.05


def running_after(processes: Iterable[Process], *, wait_s: float) -> set[Process]:
    """Returns those that still run when the time is up. A pid that another process has been given
    since is not counted."""
    deadline = time.monotonic() + wait_s
    left = set(filter(_is_running, processes))
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = set(filter(_is_running, left))
    return left


def end(processes: Iterable[Process]) -> None:
    for process in processes:
        with suppress(NoSuchProcess):
            process.kill()


def _is_running(process: Process) -> bool:
    with suppress(NoSuchProcess):
        return bool(process.is_running() and process.status() != STATUS_ZOMBIE)
    return False
