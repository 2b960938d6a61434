"""Counts the connections that this process refused, and logs them."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
"""Per host; a scan must not fill the log."""
_MAX_HOSTS = 256


class RefusedConnections:
    """The connections refused so far. From any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_refused = 0
        self._logged_s: dict[str, float] = {}
        """Time when each host was last logged."""

    @property
    def num_refused(self) -> int:
        return self._num_refused

    def add(self, host: str, *, at: str, reason: str) -> None:
        """Counts a connection from `host` to `at` that was cut."""
        with self._lock:
            self._num_refused += 1
            if not self._is_due(host):
                return
        logger.warning("connection refused: from=%s at=%s reason=%s", host, at, reason)

    def _is_due(self, host: str) -> bool:
        time_s = self._clock()
        if time_s - self._logged_s.get(host, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        if len(self._logged_s) >= _MAX_HOSTS:
            self._logged_s.clear()
        self._logged_s[host] = time_s
        return True
