"""Counts the connections that this process refused, and logs them."""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
"""Per host; a scan must not fill the log."""
_MAX_HOSTS = 256


class Filter(Protocol):
    """A listening socket with a filter in the kernel, which counts what it drops."""

    @property
    def num_dropped(self) -> int: ...


class RefusedConnections:
    """The connections refused so far. From any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # the garbage collector may call `retire` at any point
        self._num_refused = 0
        self._filters: weakref.WeakSet[Filter] = weakref.WeakSet()
        self._logged_s: dict[str, float] = {}
        """Time when each host was last logged."""

    @property
    def num_refused(self) -> int:
        with self._lock:
            return self._num_refused + sum(listener.num_dropped for listener in list(self._filters))

    def add(self, host: str, *, at: str, reason: str) -> None:
        """Counts a connection from `host` to `at` that was cut."""
        with self._lock:
            self._num_refused += 1
            if not self._is_due(host):
                return
        logger.warning("connection refused: from=%s at=%s reason=%s", host, at, reason)

    def watch(self, listener: Filter) -> None:
        """Includes what the kernel drops at this listener, as long as it is kept."""
        with self._lock:
            self._filters.add(listener)

    def retire(self, listener: Filter) -> None:
        """Keeps the count of a listener that is about to close."""
        with self._lock:
            self._filters.discard(listener)
            self._num_refused += listener.num_dropped

    def _is_due(self, host: str) -> bool:
        time_s = self._clock()
        if time_s - self._logged_s.get(host, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        if len(self._logged_s) >= _MAX_HOSTS:
            self._logged_s.clear()
        self._logged_s[host] = time_s
        return True
