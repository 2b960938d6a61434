"""A transport that ends in bounded time, and so that its client sees why.

A connection that is closed while its client still sends is reset, and the client may not see its
answer: so the rest is read for a while, within bounds. A client that takes nothing of its answer is
cut off.
"""

import asyncio
from collections.abc import Callable

LINGER_S = 2.0
LINGER_BYTES = 2**20
"""Bytes that are read and dropped, at most, of a client that has its answer already."""
_UNREAD_S = 0.25
"""Time for which the connection then stays open unread: a client that is reset while it sends may
not see an answer that it has received."""
READER_PAUSE_S = 60.0
"""Longest time in which a client may take nothing of what waits for it."""


class Timer:
    """Calls back once, unless it is stopped or started again before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, self._fire, callback)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, callback: Callable[[], None]) -> None:
        self._handle = None
        callback()


class GentleTransport(asyncio.Transport):
    """Wraps a connection's transport. Its protocol reports what arrives after `close`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        loop: asyncio.AbstractEventLoop,
        is_more_expected: Callable[[], bool],
    ) -> None:
        """`is_more_expected`: whether the client may still be sending when it is closed."""
        self._transport = transport
        self._is_more_expected = is_more_expected
        self._lingering = Timer(loop)
        self._reader = Timer(loop)
        self._is_ending = False
        self._num_discarded = 0
        self._num_waiting = 0
        """Bytes that the client had not taken at the last look."""

    def close(self) -> None:
        """Ends the connection once its answer is sent, and soon in any case."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._is_more_expected() and not self._transport.is_closing():
            self._linger()
        else:
            self._finish()

    def is_closing(self) -> bool:
        return self._is_ending or self._transport.is_closing()

    def discard(self, num_bytes: int) -> None:
        """Notes what has arrived after `close`."""
        self._num_discarded += num_bytes
        if self._num_discarded > LINGER_BYTES and self._transport.is_reading():
            self._transport.pause_reading()
            self._lingering.start(_UNREAD_S, self._finish)

    def watch_reader(self) -> None:
        """Cuts the client off if it takes nothing for too long."""
        self._num_waiting = self._transport.get_write_buffer_size()
        self._reader.start(READER_PAUSE_S, self._check_reader)

    def forget_reader(self) -> None:
        if not self._is_ending:
            self._reader.stop()

    def lost(self) -> None:
        """Called when the connection has ended."""
        self._is_ending = True
        self._lingering.stop()
        self._reader.stop()

    def _linger(self) -> None:
        if not self._transport.is_reading():
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()  # the client has all of its answer
        self._lingering.start(LINGER_S, self._finish)

    def _finish(self) -> None:
        self._lingering.stop()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self.watch_reader()

    def _check_reader(self) -> None:
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting >= self._num_waiting:
            self._transport.abort()
        else:
            self.watch_reader()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)
