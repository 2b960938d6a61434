"""Where the wall clock of the round loop goes, from one verdict to the next.

The loop says what it has spent on what it can name; what is left of the clock is `other`: handing
results on, waiting for the interpreter's lock, other processes on a busy core. It never measures
anything itself, and nothing is decided by it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unnamed:
    """What the stages of rounds do not tell, of the time since the verdict before."""

    idle_s: float
    """Nobody had anything to do."""
    other_s: float


class LoopClock:
    def __init__(self, *, now_s: float) -> None:
        self._since_s = now_s
        self._named_s = 0.0
        self._idle_s = 0.0

    def spent(self, seconds: float) -> None:
        """On something that the statistics of a round have a name for."""
        self._named_s += seconds

    def idled(self, seconds: float) -> None:
        self._idle_s += seconds

    def verdict(self, *, now_s: float) -> Unnamed:
        """A round is over: closes the account, and begins the next one."""
        left_s = now_s - self._since_s - self._named_s - self._idle_s
        unnamed = Unnamed(idle_s=self._idle_s, other_s=max(left_s, 0.0))
        self._since_s, self._named_s, self._idle_s = now_s, 0.0, 0.0
        return unnamed
