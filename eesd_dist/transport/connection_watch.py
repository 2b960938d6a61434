"""Thread of a process that watches the connections of its links while no other thread does."""

import logging
import select
import socket
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Protocol

logger = logging.getLogger(__name__)

_SCAN_S = 1.0


class WatchedLink(Protocol):
    """Methods that the watch calls, from its thread."""

    def on_writable(self) -> None:
        """The kernel has room for more bytes."""
        ...

    def on_hangup(self) -> None:
        """The connection may have ended, or another one that had its number."""
        ...

    def end_if_silent(self) -> None:
        """Called about once a second."""
        ...


class ConnectionWatch:
    """Thread that sends what waits for room in the kernel, and notices connections that ended."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._links: dict[int, weakref.ref[WatchedLink]] = {}
        threading.Thread(target=self._run, name="connections", daemon=True).start()

    def add(self, link: WatchedLink, connection: socket.socket) -> None:
        self._links[connection.fileno()] = weakref.ref(link)
        self._epoll.register(connection, select.EPOLLRDHUP)

    def wait_for_room(self, connection: socket.socket, *, waits: bool) -> None:
        """Calls the link's `on_writable` whenever the kernel has room, if it waits for that."""
        events = select.EPOLLOUT if waits else 0
        with suppress(OSError):  # removed since
            self._epoll.modify(connection, select.EPOLLRDHUP | events)

    def remove(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):  # removed before
            self._epoll.unregister(connection)

    def close(self, connection: socket.socket) -> None:
        """Takes no lock: the garbage collector may call this at any point."""
        self.remove(connection)
        self._links.pop(connection.fileno(), None)
        connection.close()

    def _run(self) -> None:
        next_scan_s = 0.0
        while True:
            for number, events in self._epoll.poll(_SCAN_S):
                self._handle(number, events)
            if time.monotonic() >= next_scan_s:
                next_scan_s = time.monotonic() + _SCAN_S
                for number in self._links.copy():
                    self._handle(number, 0)

    def _handle(self, number: int, events: int) -> None:
        """Handles events of one link, or scans it without any. Keeps no link afterwards."""
        reference = self._links.get(number)
        link = None if reference is None else reference()
        if link is None:
            return
        try:
            if events & select.EPOLLOUT:
                link.on_writable()
            if events & ~select.EPOLLOUT:
                link.on_hangup()
            if not events:
                link.end_if_silent()
        except Exception:  # of what waits for its end; the other links are to be watched further
            logger.exception("events of a connection could not be handled")


@cache
def connection_watch() -> ConnectionWatch:
    return ConnectionWatch()
