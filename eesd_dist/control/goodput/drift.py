"""How far acceptance is off from what the calibration says, followed through time.

A shift on the log-odds scale, tracked by an extended Kalman filter (West, Harrison and Migon 1985
for dynamic models of counts; this is the logistic one): every judged token moves the mean by its
surprise, and every round gives some of the certainty back, since load, text and head change. It
knows no tokens and no evidence.
"""

import math


class Drift:
    """Normal belief about one shift: its mean and variance."""

    __slots__ = ("_memory", "_widest", "mean", "variance")

    def __init__(self, *, std: float, memory: float) -> None:
        """`std`: before anything was seen, and after everything was forgotten."""
        self.mean = 0.0
        self.variance = self._widest = std * std
        self._memory = memory

    def forget_a_little(self) -> None:
        """Certainty goes, the mean stays."""
        self.variance = min(self.variance / self._memory, self._widest)

    def observe(self, score: float, *, accepted: bool) -> None:
        """One judged token; `score` is its log-odds with this shift left out."""
        p = sigmoid(score + self.mean)
        self.variance /= 1.0 + self.variance * p * (1.0 - p)
        self.mean += self.variance * (accepted - p)


def sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score)) if score > -500.0 else 0.0
