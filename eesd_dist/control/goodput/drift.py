"""Tracks how far acceptance differs from the calibration over time.

A shift on the log-odds scale, tracked by an extended Kalman filter (West, Harrison and Migon 1985
for dynamic models of counts; this is the logistic one): every judged token moves the mean by its
prediction error, and every round increases the variance, since load, text and head change. Does not
depend on tokens or evidence.
"""

import math


class Drift:
    """Normal distribution of one shift: its mean and variance."""

    __slots__ = ("_memory", "_widest", "mean", "variance")

    def __init__(self, *, std: float, memory: float) -> None:
        """`std`: standard deviation without observations; also the upper limit later."""
        self.mean = 0.0
        self.variance = self._widest = std * std
        self._memory = memory

    def forget_a_little(self) -> None:
        """Increases the variance; the mean does not change."""
        self.variance = min(self.variance / self._memory, self._widest)

    def observe(self, score: float, *, accepted: bool) -> None:
        """Updates with one judged token; `score`: its log-odds without this shift."""
        p = sigmoid(score + self.mean)
        self.variance /= 1.0 + self.variance * p * (1.0 - p)
        self.mean += self.variance * (accepted - p)


def sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score)) if score > -500.0 else 0.0
