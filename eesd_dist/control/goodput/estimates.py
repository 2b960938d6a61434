"""Two running figures: what guesses are usually worth, and how well promised rates are kept."""

import math

_PROMISE_MEMORY = 0.98
"""Per round."""
_START_TOKENS = 24.0
"""How many tokens' worth the promises are believed before one was kept."""


class RunningMean:
    """Mean and spread of the chances of guesses, the late ones most."""

    __slots__ = ("_memory", "_variance", "_weight", "mean")

    def __init__(self, *, mean: float, weight: float, memory: float) -> None:
        self.mean = mean
        self._weight = weight
        self._memory = memory
        self._variance = 0.04

    def see(self, chance: float) -> None:
        self._weight = self._memory * self._weight + 1.0
        off = chance - self.mean
        self.mean += off / self._weight
        self._variance += (off * off - self._variance) / self._weight

    @property
    def std(self) -> float:
        return math.sqrt(self._variance)


class PromiseRatio:
    """Tokens that came over tokens that were promised."""

    def __init__(self) -> None:
        self._came = self._promised = _START_TOKENS

    @property
    def value(self) -> float:
        return self._came / self._promised

    def observe(self, *, came: float, promised: float, share: float) -> None:
        """One request's `share` of a round."""
        keep = _PROMISE_MEMORY**share
        self._came = keep * self._came + came
        self._promised = keep * self._promised + promised
