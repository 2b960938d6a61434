"""Listens on ports of this node, and connects to ports of others. No Ray in here."""

import errno
import os
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import psutil

_MAX_THREADS = 64
_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """A port of this node that another process listens on."""

    port: int
    process: str
    """Name and pid; "another process" if this user may not see it."""
    is_ours: bool
    """True if it belongs to Ray, Serve included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A port that this node must be able to connect to."""

    node: str
    address: str
    port: int
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """A target that did not accept a connection."""

    target: Target
    reason: str


class Listeners:
    """Listens on all addresses of this node. The kernel accepts connections; none is answered."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def open(self, ports: Iterable[int]) -> list[PortUse]:
        """Listens on these ports; returns those that are in use, which stay as they are."""
        return [use for port in ports if (use := self._open(port)) is not None]

    def open_ephemeral(self) -> int:
        """Listens on a port that the system chooses, as links and NCCL do."""
        listener = _listener(0)
        self._sockets.append(listener)
        return int(listener.getsockname()[1])

    def open_in(self, first: int, last: int) -> int | None:
        """Listens on the last free port of the range; None if all are in use."""
        for port in range(last, first - 1, -1):
            if self._open(port) is None:
                return port
        return None

    def close(self) -> None:
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()

    def _open(self, port: int) -> PortUse | None:
        try:
            self._sockets.append(_listener(port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            return _use_of(port)
        return None


def connect_all(targets: Sequence[Target], *, timeout_s: float) -> list[Unreachable]:
    """Connects to all targets at once; each has `timeout_s`."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(_MAX_THREADS, len(targets))) as pool:
        answers = pool.map(lambda target: _connect(target, timeout_s), targets)
    return [answer for answer in answers if answer is not None]


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _use_of(port: int) -> PortUse:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid
            ):
                process = psutil.Process(connection.pid)
                words = process.cmdline()
                return PortUse(
                    port=port,
                    process=f"{process.name()} (pid {connection.pid})",
                    is_ours=any("ray::" in word or "/ray/" in word for word in words[:3]),
                )
    return PortUse(port=port, process="another process", is_ours=os.geteuid() != 0)


def _connect(target: Target, timeout_s: float) -> Unreachable | None:
    try:
        socket.create_connection((target.address, target.port), timeout=timeout_s).close()
    except TimeoutError:
        return Unreachable(target=target, reason=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Unreachable(target=target, reason=error.strerror or str(error))
    return None
