"""The plane that moves tensors between CPUs, and how to leave it when a peer is gone.

Wraps a ProcessGroupGloo of our own (never the process-global default group). Gloo has no abort and
no keepalive, so this file finds the TCP connections that belong to this plane and sets or shuts
them itself, and those to a store where the rendezvous asks for it; it is the only file that knows
they exist (Linux: /proc/self/fd). A connection is ours when it ends at our listening port here or
at a peer's listening port there; the ports were exchanged through the store.

Three facts of Gloo decide the shape of everything above: a wait that times out closes the
connection for good, so that a deadline is always the last thing that happens to a link; a send
finishes only once the peer has asked for it; and when a connection ends, every operation on it is
told but a receive whose bytes are just under way, and a send that was handed to the dying socket.
So small sends are copied and not waited for: who must know that they arrived hears from the peer.
Large transfers, and the last word before a group is left, are waited for in a thread of their own,
beside a receive that nothing ever answers and that is always told (`_Link`).
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
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

NO_DEADLINE = timedelta(days=3650)
_SHORTEST_WAIT_S = 0.001  # a timeout of zero means "the default" to torch
_LARGE_BYTES = 128 * 1024
"""Below this a connection hardly ever ends in the middle of a message. Where one does, its receiver
notices at the deadline: a thread for every small message would cost more."""
_WINDOW = 64
"""So many small sends may be under way to one peer; who sends more waits for the oldest."""
_LAST_WORDS_S = 0.05
"""What came whole before the connection ended is known to its thread by then."""
_CLOSED = "Connection closed by peer"
_LINK_TAG = 1_000_000
"""Nothing is ever sent under it."""
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 3000),
)
"""A cut link is noticed after about four seconds, in seconds and (the last) milliseconds."""

Address = tuple[str, int]

LISTENING = threading.Lock()
"""A device's listening socket is recognised by comparing before and after: nothing of ours
opens one meanwhile. What a library opens just then would be taken for the device's as well."""


class TransferBackend(Protocol):
    """What torch's backends do and its type stubs leave out."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...


class GlooDevice:
    """One listening socket on the address that the peers can reach."""

    def __init__(self, address: str) -> None:
        with LISTENING:
            before = _listening()
            self.device = ProcessGroupGloo.create_device(hostname=address)
            self.addresses = frozenset(_listening() - before)


class Pending:
    """A transfer between two CPUs that was started."""

    __slots__ = ("_link", "_work")

    def __init__(self, work: Work | None, link: "_Link | None" = None) -> None:
        """`work`: None: there is nothing to wait for. `link`: the connection it goes over, where
        Gloo might forget to say that it has ended."""
        self._work = work
        self._link = link

    def wait(self, *, timeout_s: float | None) -> None:
        """Without holding the GIL; None waits as long as the connection lives."""
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
    """A connection to a peer: it ends the waits that Gloo forgets when the connection ends."""

    def __init__(self, life: Work) -> None:
        """`life`: a receive that nothing ever answers."""
        self._lock = threading.Lock()
        self._is_gone = False
        self._unconfirmed: deque[Work] = deque()
        """Small sends, oldest first: Gloo drops those that nobody holds."""
        self._outcomes: set[Future[None]] = set()
        self._jobs: queue.SimpleQueue[tuple[Work, timedelta, Future[None]] | None]
        self._jobs = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        """As many as there are threads that wait for a job."""
        self._watch = threading.Thread(target=self._outlast, args=(life,), name="link", daemon=True)
        _links.add(self)
        self._watch.start()

    def keep(self, work: Work) -> Work | None:
        """A small send; what is to be waited for in its place."""
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

    def join(self) -> None:
        """Waits for the thread that watches; the connection has been closed."""
        self._watch.join(1.0)

    def _outlast(self, life: Work) -> None:
        with suppress(RuntimeError):
            life.wait(NO_DEADLINE)
        with self._lock:
            self._is_gone = True
        self._jobs.put(None)
        time.sleep(_LAST_WORDS_S)
        with self._lock:
            for outcome in self._outcomes:
                _settle(outcome, RuntimeError(_CLOSED))
        _links.discard(self)

    def _serve(self) -> None:
        """One of the threads that wait; one whose wait was forgotten ends with its deadline."""
        while (job := self._jobs.get()) is not None:
            self._wait_for(*job)
            del job  # its tensor is not to stay until the next one comes
        self._jobs.put(None)  # for the next thread

    def _wait_for(self, work: Work, timeout: timedelta, outcome: "Future[None]") -> None:
        error: RuntimeError | None = None
        try:
            work.wait(timeout)
        except RuntimeError as found:
            error = found
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
        peer_addresses: frozenset[Address],
    ) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub lacks it
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [device.device]
        options._threads = 1  # its threads serve gloo's own collectives; we use none of them
        self._backend = cast(TransferBackend, ProcessGroupGloo(store, rank, size, options))
        ends = _Ends(here=device.addresses, there=peer_addresses)
        ends.each_connection(_keep_alive)
        # The links' threads hold on to the connections, even when nobody else does. Once only: a
        # port of a plane that was left may be a later one's.
        self._cut = weakref.finalize(self, ends.each_connection, _shut_down)
        self._cut.atexit = False  # `_leave_all` does it
        _planes.add(self)
        _leave_all_at_exit()
        self._links = {
            peer: _Link(self._backend.recv([torch.empty(1)], peer, _LINK_TAG))
            for peer in range(size)
            if peer != rank
        }

    def isend(self, x: Tensor, *, to: int, tag: int, confirmed: bool) -> Pending:
        """Small ones are copied; `confirmed`: to wait until the peer has asked for it even so."""
        link = self._links[to]
        if confirmed or x.nbytes >= _LARGE_BYTES:
            return Pending(self._backend.send([x], to, tag), link)
        return Pending(link.keep(self._backend.send([x.clone()], to, tag)))

    def irecv(self, x: Tensor, *, source: int, tag: int) -> Pending:
        work = self._backend.recv([x], source, tag)
        return Pending(work, self._links[source] if x.nbytes >= _LARGE_BYTES else None)

    def abort(self) -> None:
        """Ends every transfer under way, here and at the peers, with a closed connection."""
        self._cut()


_planes: "weakref.WeakSet[GlooPlane]" = weakref.WeakSet()
_links: "set[_Link]" = set()
"""Whose connection has not ended, of planes that nobody holds any more too."""


@cache
def _leave_all_at_exit() -> None:
    atexit.register(_leave_all)


def _leave_all() -> None:
    """A thread that Gloo wakes while the interpreter goes down takes the process with it. Those
    that wait for small messages come out while the links say their last words."""
    for plane in list(_planes):
        plane.abort()
    for link in list(_links):
        link.join()


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where the connections of a plane end: listening ports of this process, and of the peers."""

    here: frozenset[Address]
    there: frozenset[Address]

    def each_connection(self, act: Callable[[socket.socket], None]) -> None:
        for candidate in _own_sockets():
            with closing(candidate):
                if self._are_of(candidate):
                    act(candidate)

    def _are_of(self, candidate: socket.socket) -> bool:
        try:
            here, there = candidate.getsockname()[:2], candidate.getpeername()[:2]
        except OSError:  # listening, or closed since: shutting a listener down kills the process
            return False
        return here in self.here or there in self.there


def cut_connections(host: str, port: int) -> None:
    """Ends this process's connections to host:port, and the waits of whoever uses them."""
    targets = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for candidate in _own_sockets():
        with closing(candidate):
            try:
                there = candidate.getpeername()[:2]
            except OSError:  # listening, or closed since
                continue
            if there[1] == port and there[0].removeprefix("::ffff:") in targets:
                _shut_down(candidate)


def _hear_last_words(work: Work) -> None:
    """Of a connection that has ended: what came whole before is known at once."""
    try:
        work.wait(timedelta(seconds=_LAST_WORDS_S))
    except RuntimeError as error:
        raise RuntimeError(_CLOSED) from error


def _settle(outcome: "Future[None]", error: RuntimeError | None) -> None:
    """Unless it has been settled before."""
    with suppress(InvalidStateError):
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)


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
