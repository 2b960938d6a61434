"""Messages between two ranks over one TCP connection, and the end of every wait when it ends.

A message has a tag and its bytes. Messages of one tag arrive in the order in which they were sent.
The thread that waits for a message reads the connection itself, so no other thread has to wake for
it. Of several waiting threads one reads; messages for the others go to their inboxes.

A send never waits. What the kernel does not take at once is sent by the `ConnectionWatch` of the
process, which also notices that a connection has ended while no thread reads it. A wait that misses
its deadline ends the connection, so that the peer learns of it: a message may have been read in
part. A cut cable ends it about four seconds after the peer's last sign of life.

Errors are OSErrors: TimeoutError for a missed deadline, ConnectionError for a connection that has
ended.
"""

import math
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from eesd_dist.transport.connection_watch import connection_watch

MAX_MESSAGE_BYTES = 1 << 33
"""A larger announced size is taken for a broken message."""
_HEADER = struct.Struct("<BBxxIQ")  # kind, tag, serial number, size in bytes
_BUFFERS_AT_ONCE = 64
_KEEPALIVE = (
    ("TCP_KEEPIDLE", 1),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", 3),
)
"""Ends an idle connection after four seconds without an answer of the peer."""
_SILENCE_MS = 4000
"""Ends a connection with bytes in transit after so long without an acknowledgement. Linux'
TCP_USER_TIMEOUT would also end one to a peer that is busy and does not read."""
_TCP_INFO_BYTES = 60
_PROBES, _IN_TRANSIT, _ACKNOWLEDGED_MS = 3, 24, 56
"""Offsets in Linux' struct tcp_info: unanswered probes, of an idle peer or of one without room;
unacknowledged segments; time since an acknowledgement."""
_UNANSWERED_PROBES = 3
_MESSAGE_S = 1.0
"""Least time for the rest of a message of which some bytes have come."""
_PEER_CLOSED = "the connection was closed by the peer"
_MISSED = "a wait on the connection missed its deadline"

_T = TypeVar("_T")


class _Kind(IntEnum):
    MESSAGE = 0
    CONFIRMED = 1
    """A message that its receiver answers when it takes it."""
    TAKEN = 2
    """The answer: the message with this serial number was taken."""


class _Arrival(NamedTuple):
    """A message that has arrived."""

    content: memoryview
    confirms: int | None
    """Serial number to answer with when the message is taken."""


class Sending:
    """A message that is being sent. Its bytes must not change before `wait` returns."""

    __slots__ = ("_confirmation", "_end", "_link")

    def __init__(self, link: "Link", *, end: int, confirmation: int | None) -> None:
        """`end`: position in the stream of bytes; `confirmation`: a serial number to wait for."""
        self._link = link
        self._end = end
        self._confirmation = confirmation

    def wait(self, *, timeout_s: float | None) -> None:
        """Waits until the kernel has all bytes and, for a confirmed message, until the peer has
        taken it. None waits as long as the connection lives. Raises OSError."""
        deadline = _deadline(timeout_s)
        self._link.flush(self._end, deadline=deadline)
        if self._confirmation is not None:
            self._link.wait_until_taken(self._confirmation, deadline=deadline)


class Link:
    """End of a connection. Any thread may send; for each tag one at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        """Owns the connection from now on, which is closed with the last reference to the link."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._hangup = select.poll()
        self._hangup.register(connection, select.POLLRDHUP)
        self._changed = threading.Condition(threading.Lock())
        """Guards what follows; notified when any of it has changed."""
        self._is_reading = False
        self._inboxes: defaultdict[int, deque[_Arrival]] = defaultdict(deque)
        self._taken: set[int] = set()
        self._end_reason: str | None = None
        self._flushed = threading.Condition(threading.Lock())
        """Guards what follows; notified when bytes were sent, or cannot be sent any more."""
        self._outgoing: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._sent_bytes = 0
        self._serial = 0
        self._gone_reason: str | None = None
        """Reason why nothing can be sent any more. What the peer sent before may still be read."""
        self._on_gone: list[Callable[[], None]] | None = []
        self._watch = connection_watch()
        self._watch.add(self, connection)
        weakref.finalize(self, self._watch.close, connection).atexit = False

    def send(self, contents: Sequence[memoryview], *, tag: int, confirmed: bool = False) -> Sending:
        """Starts to send the bytes of these buffers as one message. Raises ConnectionError."""
        kind = _Kind.CONFIRMED if confirmed else _Kind.MESSAGE
        size = sum(content.nbytes for content in contents)
        with self._flushed:
            if self._hangup.poll(0):  # at once: the watch may be late
                self._stop_sending(_PEER_CLOSED)
            self._serial = (self._serial + 1) % (1 << 32)
            serial = self._serial
            self._queue(_header(kind, tag, serial, size), *contents)
            end = self._queued_bytes
        return Sending(self, end=end, confirmation=serial if confirmed else None)

    def receive(
        self, *, tag: int, timeout_s: float | None, into: memoryview | None = None
    ) -> memoryview:
        """Returns the bytes of the next message with this tag: in `into`, which must be as large,
        or in new memory. None waits as long as the connection lives. Raises OSError."""

        def next_arrival() -> _Arrival | None:
            inbox = self._inboxes[tag]
            return inbox.popleft() if inbox else None

        arrival = self._wait(next_arrival, deadline=_deadline(timeout_s), tag=tag, into=into)
        content = arrival.content
        if into is not None and content is not into:
            try:
                self._expect_size(content.nbytes, into)
            except ConnectionError as error:
                self.end(str(error))
                raise
            into[:] = content
            content = into
        if arrival.confirms is not None:
            with self._flushed, suppress(ConnectionError):  # the message has arrived
                self._queue(_header(_Kind.TAKEN, 0, arrival.confirms, 0))
        return content

    def flush(self, end: int, *, deadline: float | None) -> None:
        """Waits until the kernel has all bytes before this position. Raises OSError."""
        with self._flushed:
            while self._sent_bytes < end:
                self._refuse_if_gone()
                left_s = _left_s(deadline)
                if left_s is not None and left_s <= 0:
                    break
                self._flushed.wait(left_s)
            else:
                return
        raise self._late()

    def wait_until_taken(self, serial: int, *, deadline: float | None) -> None:
        """Waits until the peer has taken the confirmed message with this number. Raises OSError."""

        def taken() -> int | None:
            if serial not in self._taken:
                return None
            self._taken.discard(serial)
            return serial

        self._wait(taken, deadline=deadline)

    def call_when_gone(self, act: Callable[[], None]) -> None:
        """Calls this once, from another thread or at once, when the connection has ended."""
        with self._flushed:
            if self._on_gone is not None:
                self._on_gone.append(act)
                return
        act()

    def end(self, reason: str = "the connection was closed here") -> None:
        """Ends every wait, here and at the peer. From any thread."""
        with self._changed:
            self._end_reason = self._end_reason or reason
            self._changed.notify_all()
        with self._flushed:
            self._stop_sending(reason)
        with suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def on_writable(self) -> None:
        """Sends more of what waits."""
        with self._flushed, suppress(ConnectionError):  # raised in the threads that wait
            self._drain()
            if not self._outgoing and self._on_gone is not None:
                self._watch.wait_for_room(self._socket, waits=False)

    def on_hangup(self) -> None:
        """Makes the calls that wait for the end of the connection, if it has ended."""
        with self._flushed:
            if not self._hangup.poll(0):
                return
            self._watch.remove(self._socket)
            self._stop_sending(_PEER_CLOSED)
            watchers, self._on_gone = self._on_gone or [], None
        for act in watchers:
            act()

    def end_if_silent(self) -> None:
        """Ends the connection of a peer that acknowledges nothing."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return
        in_transit, silent_ms = (
            int.from_bytes(info[at : at + 4], "little") for at in (_IN_TRANSIT, _ACKNOWLEDGED_MS)
        )
        needs_answer = in_transit > 0 or info[_PROBES] >= _UNANSWERED_PROBES
        if needs_answer and silent_ms > _SILENCE_MS:
            self.end(f"the peer has acknowledged nothing for {silent_ms / 1e3:.1f} s")

    def _wait(
        self,
        result: Callable[[], _T | None],
        *,
        deadline: float | None,
        tag: int | None = None,
        into: memoryview | None = None,
    ) -> _T:
        """Returns the result once there is one, which is looked for under the lock. Messages with
        this tag are read `into`."""
        while True:
            is_reader = False
            try:
                with self._changed:
                    value = result()
                    if value is not None:
                        return value
                    if self._end_reason is not None:
                        raise ConnectionError(self._end_reason)
                    is_reader = not self._is_reading
                    left_s = _left_s(deadline)
                    if is_reader:
                        self._is_reading = True
                    elif left_s is None or left_s > 0:
                        self._changed.wait(left_s)
                        continue
                if not is_reader:
                    raise self._late()
                self._read(deadline, tag=tag, into=into)
            finally:
                if is_reader:
                    with self._changed:
                        self._is_reading = False
                        self._changed.notify_all()

    def _read(self, deadline: float | None, *, tag: int | None, into: memoryview | None) -> None:
        """Reads one message to where it is waited for. Raises OSError."""
        try:
            self._await_bytes(deadline)
            if deadline is not None:
                deadline = max(deadline, time.monotonic() + _MESSAGE_S)
            header = memoryview(bytearray(_HEADER.size))
            self._fill(header, deadline)
            kind, arrived_tag, serial, size = _HEADER.unpack(header)
            if kind == _Kind.TAKEN:
                with self._changed:
                    self._taken.add(serial)
                return
            content = self._room_for(size, into if arrived_tag == tag else None)
            self._fill(content, deadline)
            arrival = _Arrival(content, serial if kind == _Kind.CONFIRMED else None)
            with self._changed:
                self._inboxes[arrived_tag].append(arrival)
        except ConnectionError as error:
            self.end(str(error))
            raise ConnectionError(self._end_reason) from error
        except BaseException as error:  # a message may have been read in part
            self.end(_MISSED if isinstance(error, TimeoutError) else "a wait was interrupted")
            raise

    def _room_for(self, size: int, into: memoryview | None) -> memoryview:
        if into is not None:
            self._expect_size(size, into)
            return into
        if size > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"found a message of {size} bytes, expected a size that fits")
        return new_memory(size)

    def _expect_size(self, size: int, into: memoryview) -> None:
        if size != into.nbytes:
            raise ConnectionError(f"found a message of {size} bytes, expected {into.nbytes}")

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        while view:
            try:
                num_bytes = self._socket.recv_into(view)
            except BlockingIOError:
                self._await_bytes(deadline)
                continue
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if num_bytes == 0:
                raise ConnectionError(_PEER_CLOSED)
            view = view[num_bytes:]

    def _await_bytes(self, deadline: float | None) -> None:
        left_s = _left_s(deadline)
        left_ms = None if left_s is None else max(math.ceil(left_s * 1e3), 0)
        if not self._readable.poll(left_ms):
            raise TimeoutError("timed out")

    def _late(self) -> TimeoutError:
        self.end(_MISSED)
        return TimeoutError("timed out")

    def _queue(self, *contents: memoryview) -> None:
        """Sends what the kernel takes, and leaves the others to the watch."""
        self._refuse_if_gone()
        is_waiting = bool(self._outgoing)
        for content in contents:
            if content.nbytes:
                self._outgoing.append(content)
                self._queued_bytes += content.nbytes
        if is_waiting:
            return
        self._drain()
        if self._outgoing and self._on_gone is not None:
            self._watch.wait_for_room(self._socket, waits=True)

    def _drain(self) -> None:
        while self._outgoing:
            try:
                num_bytes = self._socket.sendmsg(islice(self._outgoing, _BUFFERS_AT_ONCE))
            except BlockingIOError:
                break
            except OSError as error:
                self._stop_sending(str(error))
                with suppress(OSError):  # what was sent may be half of a message
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise ConnectionError(str(error)) from error
            self._sent_bytes += num_bytes
            while num_bytes:
                buffer = self._outgoing.popleft()
                if buffer.nbytes > num_bytes:
                    self._outgoing.appendleft(buffer[num_bytes:])
                    break
                num_bytes -= buffer.nbytes
        self._flushed.notify_all()

    def _stop_sending(self, reason: str) -> None:
        self._gone_reason = self._gone_reason or reason
        self._outgoing.clear()
        self._flushed.notify_all()

    def _refuse_if_gone(self) -> None:
        if self._gone_reason is not None:
            raise ConnectionError(self._gone_reason)


def bytes_of(x: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU, of any type."""
    assert x.is_contiguous(), "a copy would be sent, or received into"
    if x.dtype == torch.bfloat16:  # which NumPy lacks
        x = x.view(torch.int16)
    return x.numpy().reshape(-1).view(np.uint8).data


def new_memory(size: int) -> memoryview:
    """Returns memory without values that begins at a multiple of 64 bytes."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def _header(kind: _Kind, tag: int, serial: int, size: int) -> memoryview:
    return memoryview(_HEADER.pack(kind, tag, serial, size))


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
