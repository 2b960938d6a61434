"""Point-to-point transfers between CPUs over Gloo, and how to abort them when a peer is lost.

Wraps a separate ProcessGroupGloo (never the process-global default group). Gloo has no abort and no
keepalive, so this module finds the plane's TCP connections itself (Linux: /proc/self/fd), sets
their keepalive options and shuts them down. No other module touches sockets of the plane. A
connection belongs to the plane when it ends at the plane's listening port on this host or at a
peer's listening port; the ports are exchanged through the store.

Gloo has no authentication either: a connection that begins with the number of a pair becomes that
pair. So a `ListenerGuard` admits nothing before the members are known, their hosts (without the
privilege for that: any host) while the group is being connected, and nothing afterwards; then
`cut_unreported` cuts each accepted connection that no member reports, through the store, to have
opened, and the peers prove the secret of their epoch (`rendezvous`).

Three properties of Gloo shape the layers above. A wait that times out closes the connection for
good, so a link is unusable after a missed deadline. A send finishes only once the peer has asked
for it. When a connection ends, all operations on it fail except two, which stay blocked: a receive
of which bytes are just arriving, and a send that was already given to the closing socket. So small
sends are copied and not waited for; callers that need to know of their arrival wait for the peer's
answer. Large transfers, and the last message before a group is left, are waited for in a separate
thread, next to a receive that is never answered and always fails with the connection (`_Link`).
"""

import atexit
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from eesd_dist.errors import EngineError
from eesd_dist.transport.authentication.connection_filter import (
    LISTENING,
    ListenerGuard,
    Listeners,
    guard_listener,
)
from eesd_dist.transport.authentication.refused import RefusedConnections

NO_DEADLINE = timedelta(days=3650)
_SHORTEST_WAIT_S = 0.001  # a timeout of zero means "the default" to torch
_LARGE_BYTES = 128 * 1024
"""Smaller messages are rarely cut by a connection that ends. The receiver of one that is notices at
its deadline: a thread for every small message would cost more."""
_WINDOW = 64
"""Maximum small sends in progress to one peer; further sends wait for the oldest."""
_LAST_WORDS_S = 0.05
"""Time in which transfers that completed before the connection ended are reported as complete."""
_CLOSED = "Connection closed by peer"
_LINK_TAG = 1_000_000
"""Tag of the receive that is never answered; nothing is sent under it."""
_MAX_SOCKETS = 8
"""A scan finds one socket in thousands before its guard."""
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 3000),
)
"""Detects a cut link after about four seconds. In seconds; the last one in milliseconds."""

SocketAddress = tuple[str, int]
Connection = tuple[SocketAddress, SocketAddress]
"""Addresses from which and to which a socket is connected."""


class TransferBackend(Protocol):
    """Methods of torch's backends that its type stubs lack."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...


class GlooDevice:
    """Listening socket on the address at which the peers reach this host, behind a guard."""

    def __init__(self, address: str, *, refusals: RefusedConnections | None = None) -> None:
        """Gloo opens the socket before it can get a guard. A socket that has a connection by then
        is replaced by another: Gloo may have taken the connection for a peer's."""
        self.refusals = refusals or RefusedConnections()
        for _ in range(_MAX_SOCKETS):
            with LISTENING:
                listeners = Listeners()
                self.device = ProcessGroupGloo.create_device(hostname=address)
                self.guard = guard_listener(listeners.new())
            self.addresses = frozenset([self.guard.address])
            self.refusals.watch(self.guard)
            if not self._cut_early_ones():
                break
            _release(self.guard, self.refusals)
        else:
            raise EngineError(
                f"each of {_MAX_SOCKETS} sockets on {address} had a connection before its guard: "
                "stop the port scan"
            )
        self.release = weakref.finalize(self, _release, self.guard, self.refusals)
        """Called at the end of the group, otherwise when the device is collected."""

    def _cut_early_ones(self) -> bool:
        """Cuts the connections that came before the guard; returns whether there were any."""
        any_cut = self.guard.cut_waiting()
        ends = _Ends(local=self.addresses, remote=frozenset())
        for connection, local, remote in ends.connections():
            _shut_down(connection)
            at = f"{local[0]}:{local[1]}"
            self.refusals.add(remote[0], at=at, reason="it came before the guard")
            any_cut = True
        return any_cut


class Pending:
    """A transfer between two CPUs in progress."""

    __slots__ = ("_link", "_work")

    def __init__(self, work: Work | None, link: "_Link | None" = None) -> None:
        """`work`: None: nothing to wait for. `link`: the connection to watch, for transfers that
        Gloo may leave blocked when it ends."""
        self._work = work
        self._link = link

    def wait(self, *, timeout_s: float | None) -> None:
        """Waits without holding the GIL; None waits as long as the connection lives."""
        timeout = NO_DEADLINE
        if timeout_s is not None:
            timeout = timedelta(seconds=max(timeout_s, _SHORTEST_WAIT_S))
        if self._work is None:
            return
        if self._link is None:
            self._work.wait(timeout)
        else:
            self._link.wait(self._work, timeout)


class _Link:
    """A connection to a peer. Ends the waits that Gloo leaves blocked when the connection ends."""

    def __init__(self, life: Work) -> None:
        """`life`: a receive that is never answered."""
        self._lock = threading.Lock()
        self._is_gone = False
        self._on_gone: list[Callable[[], None]] = []
        self._unconfirmed: deque[Work] = deque()
        """Small sends, oldest first: Gloo drops sends without a reference."""
        self._outcomes: set[Future[None]] = set()
        self._jobs: queue.SimpleQueue[tuple[Work, timedelta, Future[None]] | None]
        self._jobs = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        """Counts the threads that wait for a job."""
        self._watch = threading.Thread(target=self._outlast, args=(life,), name="link", daemon=True)
        _links.add(self)
        self._watch.start()

    def keep(self, work: Work) -> Work | None:
        """Holds a small send. Returns the oldest one when the window is full: wait for it first."""
        if self._is_gone:
            raise RuntimeError(_CLOSED)
        self._unconfirmed.append(work)
        return self._unconfirmed.popleft() if len(self._unconfirmed) > _WINDOW else None

    def wait(self, work: Work, timeout: timedelta) -> None:
        outcome: Future[None] = Future()
        with self._lock:
            is_gone = self._is_gone
            if not is_gone:
                self._outcomes.add(outcome)
                if not self._idle.acquire(blocking=False):
                    threading.Thread(target=self._serve, name="transfers", daemon=True).start()
                self._jobs.put((work, timeout, outcome))
        if is_gone:
            return _hear_last_words(work)
        try:
            outcome.result()
        finally:
            with self._lock:
                self._outcomes.discard(outcome)

    def call_when_gone(self, act: Callable[[], None]) -> None:
        """Calls this once, from another thread or at once, when the connection has ended."""
        with self._lock:
            is_gone = self._is_gone
            if not is_gone:
                self._on_gone.append(act)
        if is_gone:
            act()

    def join(self) -> None:
        """Waits for the watching thread; call after closing the connection."""
        self._watch.join(1.0)

    def _outlast(self, life: Work) -> None:
        with suppress(RuntimeError):
            life.wait(NO_DEADLINE)
        with self._lock:
            self._is_gone = True
            watchers, self._on_gone = self._on_gone, []
        while watchers:
            watchers.pop(0)()  # keeps nothing of the group alive
        self._jobs.put(None)
        time.sleep(_LAST_WORDS_S)
        with self._lock:
            for outcome in self._outcomes:
                _settle(outcome, RuntimeError(_CLOSED))
        _links.discard(self)

    def _serve(self) -> None:
        """Body of a waiting thread. A wait that Gloo leaves blocked ends at its deadline."""
        while (job := self._jobs.get()) is not None:
            self._wait_for(*job)
            del job  # or its tensor stays in memory until the next job
        self._jobs.put(None)  # for the next thread

    def _wait_for(self, work: Work, timeout: timedelta, outcome: "Future[None]") -> None:
        error: RuntimeError | None = None
        try:
            work.wait(timeout)
        except RuntimeError as failure:
            error = failure
        self._idle.release()
        _settle(outcome, error)


class GlooPlane:
    """Point-to-point transfers between the ranks of one epoch of one group."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        device: GlooDevice,
        peer_addresses: frozenset[SocketAddress],
    ) -> None:
        """The guard of `device` must admit the peers' hosts."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub lacks it
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [device.device]
        options._threads = 1  # threads for Gloo's collectives, which are not used
        self._backend = cast(TransferBackend, ProcessGroupGloo(store, rank, size, options))
        device.guard.block()
        ends = _Ends(local=device.addresses, remote=peer_addresses)
        for connection, *_ in ends.connections():
            _keep_alive(connection)
        self._ends = ends
        self._refusals = device.refusals
        # The links' threads keep the connections open, so they are cut when the plane is collected.
        # Only once: a later plane may get the same port.
        self._cut = weakref.finalize(self, _end, ends, device)
        self._cut.atexit = False  # `_leave_all` does it
        _planes.add(self)
        _leave_all_at_exit()
        self._links = {
            peer: _Link(self._backend.recv([torch.empty(1)], peer, _LINK_TAG))
            for peer in range(size)
            if peer != rank
        }

    def opened(self) -> frozenset[Connection]:
        """Returns the connections that this rank has opened to its peers."""
        connections = [(local, remote) for _, local, remote in self._ends.connections()]
        return frozenset(
            connection for connection in connections if connection[0] not in self._ends.local
        )

    def cut_unreported(self, opened_by_peers: frozenset[Connection]) -> None:
        """Cuts accepted connections that no peer has opened."""
        for connection, local, remote in self._ends.connections():
            if local in self._ends.local and (remote, local) not in opened_by_peers:
                _shut_down(connection)
                at = f"{local[0]}:{local[1]}"
                reason = "no rank of the group has opened it"
                self._refusals.add(remote[0], at=at, reason=reason)

    def isend(self, x: Tensor, *, to: int, tag: int, confirmed: bool) -> Pending:
        """Starts a send. Small ones are copied and finish at once, unless `confirmed`: then the
        wait lasts until the peer has asked for it."""
        link = self._links[to]
        if confirmed or x.nbytes >= _LARGE_BYTES:
            return Pending(self._backend.send([x], to, tag), link)
        return Pending(link.keep(self._backend.send([x.clone()], to, tag)))

    def irecv(self, x: Tensor, *, source: int, tag: int) -> Pending:
        work = self._backend.recv([x], source, tag)
        return Pending(work, self._links[source] if x.nbytes >= _LARGE_BYTES else None)

    def call_when_gone(self, act: Callable[[int], None]) -> None:
        """Calls this with each peer when the connection to it has ended."""
        for peer, link in self._links.items():
            link.call_when_gone(partial(act, peer))

    def abort(self) -> None:
        """Ends all transfers in progress, here and at the peers, by closing the connections."""
        self._cut()


_planes: "weakref.WeakSet[GlooPlane]" = weakref.WeakSet()
_links: "set[_Link]" = set()
"""Links with an open connection, including those of planes that were collected."""


@cache
def _leave_all_at_exit() -> None:
    atexit.register(_leave_all)


def _leave_all() -> None:
    """Ends all waits: a thread that Gloo wakes during interpreter shutdown crashes the process.
    Threads that wait for small messages return while the links are joined."""
    for plane in list(_planes):
        plane.abort()
    for link in list(_links):
        link.join()


@dataclass(frozen=True, slots=True)
class _Ends:
    """Addresses where a plane's connections end: listening ports of this process and of peers."""

    local: frozenset[SocketAddress]
    remote: frozenset[SocketAddress]

    def connections(self) -> Iterator[tuple[socket.socket, SocketAddress, SocketAddress]]:
        """Yields each connection, its address on this host, and its other end."""
        for candidate in _own_sockets():
            with closing(candidate):
                try:
                    local, remote = candidate.getsockname()[:2], candidate.getpeername()[:2]
                except OSError:  # listening or closed; shutting a listener down crashes the process
                    continue
                if local in self.local or remote in self.remote:
                    yield candidate, local, remote


def _hear_last_words(work: Work) -> None:
    """Waits for a transfer on a closed connection: if it completed before, that is known at once.
    Raises RuntimeError otherwise."""
    try:
        work.wait(timedelta(seconds=_LAST_WORDS_S))
    except RuntimeError as error:
        raise RuntimeError(_CLOSED) from error


def _settle(outcome: "Future[None]", error: RuntimeError | None) -> None:
    """Sets the outcome unless it is set already."""
    with suppress(InvalidStateError):
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)


def _end(ends: _Ends, device: GlooDevice) -> None:
    for connection, *_ in ends.connections():
        _shut_down(connection)
    device.release()


def _release(listener: ListenerGuard, refusals: RefusedConnections) -> None:
    refusals.retire(listener)
    listener.release()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # already closed by the peer
        return


def _own_sockets() -> Iterator[socket.socket]:
    """Yields duplicates of this process's TCP sockets; closing one leaves the original open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            handle = os.dup(int(name))
        except OSError:  # closed since it was listed
            continue
        try:
            candidate = socket.socket(fileno=handle)
        except OSError:  # something else has its number by now
            os.close(handle)
            continue
        if candidate.family in (socket.AF_INET, socket.AF_INET6):
            yield candidate
        else:
            candidate.close()
