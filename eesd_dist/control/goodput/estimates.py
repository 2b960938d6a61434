"""Running estimates: the usual value of guesses, and how well forecasts of tokens hold."""

import math

_PROMISE_MEMORY = 0.98
"""Discount per round."""
_START_TOKENS = 24.0
"""Prior weight of a ratio of 1, in tokens."""


class RunningMean:
    """Mean and spread of the guesses' probabilities, discounted over time."""

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
    """Tokens received over tokens expected, of recent rounds."""

    def __init__(self) -> None:
        self._came = self._promised = _START_TOKENS

    @property
    def value(self) -> float:
        return self._came / self._promised

    def observe(self, *, came: float, promised: float, share: float) -> None:
        """Adds one request's `share` of a round."""
        keep = _PROMISE_MEMORY**share
        self._came = keep * self._came + came
        self._promised = keep * self._promised + promised
