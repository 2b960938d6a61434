"""Which processes descend from this one, and whether they are gone.

Ray's own shutdown leaves helpers behind for a minute or two when a node died untidily; whoever
started Ray has to be able to tell, and to end them. Linux only: elsewhere nothing is found, and
nothing is done.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A process for certain: its number may be given to another one, its number and start not."""

    pid: int
    started_ticks: int

    @property
    def is_running(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat.started_ticks == self.started_ticks and not stat.is_zombie


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    started_ticks: int
    is_zombie: bool


def descendants(root: int | None = None) -> set[Process]:
    """Children, their children and so on; of this process, unless told of whom."""
    children: defaultdict[int, list[Process]] = defaultdict(list)
    for entry in _PROC.glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat is not None:
            children[stat.parent].append(Process(int(entry.name), stat.started_ticks))
    found: set[Process] = set()
    frontier = [os.getpid() if root is None else root]
    while frontier:
        for process in children[frontier.pop()]:
            found.add(process)
            frontier.append(process.pid)
    return found


def running_after(processes: Iterable[Process], *, wait_s: float) -> set[Process]:
    """Those of them that are still there when the time is up."""
    deadline = time.monotonic() + wait_s
    left = {process for process in processes if process.is_running}
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = {process for process in left if process.is_running}
    return left


def end(processes: Iterable[Process]) -> None:
    for process in processes:
        if not process.is_running:
            continue
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it was quicker
            continue


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:  # gone since it was listed
        return None
    # The command stands in brackets and may contain anything, brackets included.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(parent=int(fields[1]), started_ticks=int(fields[19]), is_zombie=fields[0] == "Z")
