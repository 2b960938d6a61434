"""Running estimates of a batch: guesses, forecasts, drift of acceptance, exploration budgets.

The drift is a shift on the log-odds scale, tracked by an extended Kalman filter (West, Harrison and
Migon 1985 for dynamic models of counts; this is the logistic one): every judged token moves the
mean by its prediction error, and every round increases the variance, since load, text and head
change.

Looking (computing a guess) and drafting have separate budgets, so that looking, which is cheaper,
does not use up the budget of drafting, which is more informative: with one budget a text that
became easy was not detected for more than a thousand rounds.
"""

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


_DRAFTING_SHARE, _LOOKING_SHARE = 0.0015, 0.0035
"""Shares of all tokens."""
_PRICE_MEMORY = 0.99
"""Discount per round of the highest probe price, the limit of a budget: rounds differ in size."""
_PROFIT_MEMORY = 0.98


class Exploration:
    """Budgets of one batch, in tokens, as a share of all tokens."""

    def __init__(self) -> None:
        self.drafting = 0.0
        """Budget for probes and optimistic draws."""
        self._looking = 0.0
        self._ceiling = 0.0
        self._look_profit = 0.0
        """Mean profit, in tokens, of looks at levels that are not expected to pay."""

    def earn(self, *, num_requests: int, probe_price: float) -> None:
        """Adds a round's share to the budgets, up to the highest probe price of recent rounds."""
        self._ceiling = ceiling = max(probe_price, _PRICE_MEMORY * self._ceiling, 0.01)
        self.drafting = min(self.drafting + _DRAFTING_SHARE * num_requests, ceiling)
        self._looking = min(self._looking + _LOOKING_SHARE * num_requests, ceiling)

    def may_look(self, price: float) -> bool:
        """Returns whether to look: always if looks have been profitable, else if the budget has
        `price`."""
        return self._look_profit >= 0.0 or self._looking >= price

    def looked(self, profit: float, *, price: float) -> None:
        """Pays for one look, and learns what it has gained."""
        if self._look_profit < 0.0:
            self._looking -= price
        self._look_profit += (1.0 - _PROFIT_MEMORY) * (profit - self._look_profit)
