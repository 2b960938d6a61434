"""Log lines about refused requests, few however many there are.

The first refusal of a client with a status is logged at once, the others as a number at the end of
each interval: a guesser of keys must not fill the disk.
"""

import asyncio
import logging
from collections import Counter

logger = logging.getLogger(__name__)

_INTERVAL_S = 60.0
_MAX_CLIENTS = 256
"""Kinds of refusals with lines of their own in one interval, at most."""
_OTHERS = "others"

_Kind = tuple[str, int]
"""Address of the client, status."""


class RefusalLog:
    """The refusals of one process; notes them inside its event loop."""

    def __init__(self, *, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._repetitions: Counter[_Kind] = Counter()
        """Refusals of this interval that have no line, by kinds that have one."""

    def note(self, *, client: str, status: int, path: str, reason: str) -> None:
        if not self._repetitions:
            asyncio.get_running_loop().call_later(self._interval_s, self._sum_up)
        kind = (client, status)
        if kind not in self._repetitions and len(self._repetitions) >= _MAX_CLIENTS:
            kind = (_OTHERS, status)
        if kind in self._repetitions:
            self._repetitions[kind] += 1
            return
        self._repetitions[kind] = 0
        logger.info(
            "request refused: client=%s status=%d path=%s reason=%s",
            kind[0], status, path, reason,
        )  # fmt: skip

    def _sum_up(self) -> None:
        for (client, status), count in self._repetitions.items():
            if count:
                logger.info(
                    "more requests refused: client=%s status=%d count=%d within_s=%g",
                    client, status, count, self._interval_s,
                )  # fmt: skip
        self._repetitions.clear()
