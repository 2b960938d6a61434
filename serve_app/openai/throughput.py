"""Time that a refused request should wait: live requests divided by the rate at which they end."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 60.0
_MIN_S = 1.0
_MAX_S = 60.0


class Throughput:
    """Counts the choices of one ingress that are live, and those that ended within a minute."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._ended_s: deque[float] = deque()
        self.num_live = 0

    def started(self, num_choices: int) -> None:
        self.num_live += num_choices

    def ended(self, num_choices: int, *, num_empty: int = 0) -> None:
        """Counts choices that are not live any more; `num_empty` of them have got no token."""
        self.num_live -= num_choices + num_empty
        self._ended_s.extend([self._clock()] * num_choices)
        self._forget()

    def retry_after_s(self) -> float:
        """Returns the time in which the live choices end at the present rate, within bounds; while
        none has ended, as long as that has been so."""
        self._forget()
        window_s = min(_WINDOW_S, self._clock() - self._began_s)
        num_ended = len(self._ended_s)
        expected_s = self.num_live * window_s / num_ended if num_ended else window_s
        return min(max(expected_s, _MIN_S), _MAX_S)

    def _forget(self) -> None:
        oldest_s = self._clock() - _WINDOW_S
        while self._ended_s and self._ended_s[0] < oldest_s:
            self._ended_s.popleft()
