"""The plane that moves tensors between CPUs, and how to leave it when a peer is gone.

Wraps a ProcessGroupGloo of our own (never the process-global default group). Gloo has no abort and
no keepalive, so this file finds the TCP connections that belong to this plane and sets or shuts
them itself; it is the only file that knows they exist (Linux: /proc/self/fd). A connection is ours
when it ends at our listening port here or at a peer's listening port there; the ports were
exchanged through the store.

Two facts of Gloo decide the shape of everything above: a wait that times out closes the
connection for good, so that a deadline is always the last thing that happens to a link; and a send
finishes only once the peer has asked for it, so that a sender who must not wait keeps the work.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Protocol, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

NO_DEADLINE = timedelta(days=3650)
_SHORTEST_WAIT_S = 0.001  # a timeout of zero means "the default" to torch
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 3000),
)
"""A cut link is noticed after about four seconds, in seconds and (the last) milliseconds."""

Address = tuple[str, int]

# A new listening socket is recognised by comparing before and after: one device at a time.
_device_lock = threading.Lock()


class TransferBackend(Protocol):
    """What torch's backends do and its type stubs leave out."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...


class GlooDevice:
    """One listening socket on the address that the peers can reach."""

    def __init__(self, address: str) -> None:
        with _device_lock:
            before = _listening()
            self.device = ProcessGroupGloo.create_device(hostname=address)
            self.addresses = frozenset(_listening() - before)


class GlooPlane:
    """Point-to-point transfers between the ranks of one generation of one group."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        device: GlooDevice,
        peer_addresses: frozenset[Address],
    ) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub lacks it
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [device.device]
        options._threads = 1  # its threads serve gloo's own collectives; we use none of them
        self._here = device.addresses
        self._there = peer_addresses
        self._backend = cast(TransferBackend, ProcessGroupGloo(store, rank, size, options))
        self._each_connection(_keep_alive)

    def isend(self, x: Tensor, *, to: int, tag: int) -> Work:
        return self._backend.send([x], to, tag)

    def irecv(self, x: Tensor, *, source: int, tag: int) -> Work:
        return self._backend.recv([x], source, tag)

    def abort(self) -> None:
        """Ends every transfer under way, here and at the peers, with a closed connection."""
        self._each_connection(_shut_down)

    def _each_connection(self, act: Callable[[socket.socket], None]) -> None:
        for candidate in _own_sockets():
            with closing(candidate):
                if self._is_ours(candidate):
                    act(candidate)

    def _is_ours(self, candidate: socket.socket) -> bool:
        try:
            here, there = candidate.getsockname()[:2], candidate.getpeername()[:2]
        except OSError:  # listening, or closed since: shutting a listener down kills the process
            return False
        return here in self._here or there in self._there


def wait(work: Work, *, timeout_s: float | None) -> None:
    """Waits for a transfer without holding the GIL; None waits as long as the link lives."""
    if timeout_s is None:
        work.wait(NO_DEADLINE)
    else:
        work.wait(timedelta(seconds=max(timeout_s, _SHORTEST_WAIT_S)))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the peer was quicker: it is closed, which is what we want
        return


def _listening() -> set[Address]:
    found = set()
    for candidate in _own_sockets():
        with closing(candidate):
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(candidate.getsockname()[:2])
    return found


def _own_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets; closing one leaves the original open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            candidate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        if candidate.family in (socket.AF_INET, socket.AF_INET6):
            yield candidate
        else:
            candidate.close()
