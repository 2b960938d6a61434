"""What the processes of a local service hold: memory, file handles, sockets, threads.

A process has its role from its title: Ray writes the class of an actor there. Linux only.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from psutil import Error as PsutilError
from psutil import Process

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")

ROLES: Mapping[str, str] = {
    "ingress": r"ray::ServeReplica:.*:Ingress",
    "replica": r"ray::ServeReplica:.*:Pipeline",
    "drafting actor": r"ray::DraftActor",
    "verify rank": r"ray::RankActor",
    "router": r"ray::Router",
    "proxy": r"ray::ProxyActor",
    "controller": r"ray::ServeController",
    "raylet": r"\S*/raylet(\s|$)",
    "gcs": r"\S*/gcs_server(\s|$)",
}
"""Role to the beginning of the process' title. Draft ranks other than the drafting actor count as
verify ranks: their processes have the same class."""
OTHER = "other"
"""Ray's agents and log monitor, and workers without an actor."""
RAYS_OWN = frozenset({"controller", "raylet", "gcs", OTHER})
"""Roles of processes that run no code of this project. Ray's head remembers every actor that has
died, and its log monitor keeps the files of ended processes open, up to 200."""


class Pid(NamedTuple):
    """A process, told from a later one with the same number."""

    number: int
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one process holds."""

    role: str
    memory_bytes: int
    """Resident memory, with what it shares."""
    handles: int
    sockets: int
    threads: int


def role_of(title: str) -> str:
    return next((role for role, start in ROLES.items() if re.match(start, title)), OTHER)


class Family:
    """The processes that this process has started, directly or not."""

    def __init__(self) -> None:
        self._roles: dict[Pid, str] = {}

    def holdings(self) -> dict[Pid, Holdings]:
        holdings: dict[Pid, Holdings] = {}
        for process in Process().children(recursive=True):
            with suppress(PsutilError, FileNotFoundError, ProcessLookupError):  # it has ended
                pid = Pid(process.pid, process.create_time())
                holdings[pid] = self._of(process, pid)
        return holdings

    def _of(self, process: Process, pid: Pid) -> Holdings:
        targets = _fd_targets(pid.number)
        with process.oneshot():
            return Holdings(
                role=self._role(process, pid),
                memory_bytes=process.memory_info().rss,
                handles=len(targets),
                sockets=sum(target.startswith("socket:") for target in targets),
                threads=process.num_threads(),
            )

    def _role(self, process: Process, pid: Pid) -> str:
        """Remembers a role: Ray changes titles while a method runs, and has none at first."""
        if self._roles.get(pid, OTHER) == OTHER:
            self._roles[pid] = role_of(" ".join(process.cmdline()))
        return self._roles[pid]


def num_live_actors() -> int:
    """Returns how many actors there are in any state but dead.

    The state API needs the dashboard.
    """
    from ray._private.state import actors

    return sum(actor["State"] != "DEAD" for actor in actors().values())


def shared_memory_bytes() -> int:
    """Returns what is in use of /dev/shm, by whichever process."""
    stats = os.statvfs(_SHARED_MEMORY)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def _fd_targets(pid: int) -> list[str]:
    """Returns what every open file descriptor refers to."""
    targets: list[str] = []
    for entry in os.scandir(_PROC / str(pid) / "fd"):
        with suppress(FileNotFoundError):  # closed since it was listed
            targets.append(os.readlink(entry.path))
    return targets
