"""Rule, as numbers, for how far to draft one chain; it needs its controller only before and after.

A controller that can say in advance how it will decide returns a `ChainRule` at the start of a
round, and a compiled drafter drafts the whole chain in one call. The functions here are that
decision, in Python and as parts of a kernel. A rule is constant: what a round teaches is told to
the controller after it (`ChainReport`).
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

SURELY = 1e-12
"""Minimum gain in value: of equal lengths the shorter is taken."""
NO, YES, LOOK, PROBE = range(4)
"""Answers to whether to guess: not; since it is expected to pay; to see whether the next token is
an easy one; to draft a token that is not expected to pay, for what its verdict teaches."""
_EDGE = 1e-3
_FREE_MEAN = 0.5
"""Acceptance that a rule without a calibration gives every guess."""


class LogOdds(NamedTuple):
    """A calibration at one temperature: bias + depth * d + (slope + slope_of_slope * x) * x, with d
    drafted tokens before and x = log(1 + gap); then its curve."""

    bias: float
    depth: float
    slope: float
    slope_of_slope: float
    curve: Doubles
    """[C, 2] forecasts and shares; empty: the forecast is not changed."""


NO_ODDS = LogOdds(0.0, 0.0, 0.0, 0.0, np.zeros((0, 2)))


class ChainRule(NamedTuple):
    """Decides from the expected value of longer drafts, in tokens, against their price."""

    prices: Doubles
    """[K + 1] price in tokens of a draft of k tokens; nothing longer is drafted."""
    guess_price: float
    """Part of a token's price that its guess costs."""
    mean: float
    """Acceptance of a token before its guess is known."""
    hopeful: float
    """The same, a standard deviation higher."""
    looks: bool
    probes: bool
    optimism: float
    """Tokens that draws above the mean may cost in this round."""
    odds: LogOdds
    shift: float
    """Added to the log-odds of acceptance."""
    deviation: float
    """Added for the round's Thompson draw."""


class ChainReport(NamedTuple):
    """Results that a controller learns from the drafting of one chain."""

    means: tuple[float, ...]
    """Acceptance that the rule gave each guess, in order, the one that ended the draft included."""
    num_drafted: int
    num_looks: int
    looked: float
    """Value of the looks above their price."""
    spent: float
    """Tokens that draws above the mean have cost."""
    probed: bool


NUM_NUMBERS = 12
"""Numbers of a rule besides its arrays."""


class RuleTables(NamedTuple):
    """Rules as numbers. Rules share arrays that are the same object."""

    numbers: list[tuple[float, ...]]
    """NUM_NUMBERS of each rule."""
    prices: list[Doubles]
    curves: list[Doubles]
    places: list[tuple[int, int]]
    """Indices of each rule's prices and curve."""


def tables_of(rules: Sequence[ChainRule]) -> RuleTables:
    """Returns the tables of which `rule_of` makes the rules again."""
    prices: dict[int, Doubles] = {}
    curves: dict[int, Doubles] = {}
    price_at: dict[int, int] = {}
    curve_at: dict[int, int] = {}
    numbers: list[tuple[float, ...]] = []
    places: list[tuple[int, int]] = []
    for own, guess, mean, hopeful, looks, probes, optimism, odds, shift, deviation in rules:
        bias, depth, slope, slope_of_slope, curve = odds
        before, after = (guess, mean, hopeful, looks, probes, optimism), (shift, deviation)
        numbers.append((*before, bias, depth, slope, slope_of_slope, *after))
        prices.setdefault(id(own), own)
        curves.setdefault(id(curve), curve)
        places.append(
            (
                price_at.setdefault(id(own), len(price_at)),
                curve_at.setdefault(id(curve), len(curve_at)),
            )
        )
    return RuleTables(numbers, list(prices.values()), list(curves.values()), places)


def rule_of(numbers: Sequence[float], prices: Doubles, curve: Doubles) -> ChainRule:
    """Returns the rule with these numbers, in the order of its fields."""
    n = numbers
    odds = LogOdds(n[6], n[7], n[8], n[9], curve)
    return ChainRule(prices, n[0], n[1], n[2], n[3] != 0.0, n[4] != 0.0, n[5], odds, n[10], n[11])


@cache
def of_length(length: int) -> ChainRule:
    """Returns the rule that drafts so many tokens whatever the guesses are."""
    return ChainRule(
        prices=np.zeros(length + 1),
        guess_price=0.0,
        mean=1.0,
        hopeful=1.0,
        looks=False,
        probes=False,
        optimism=0.0,
        odds=NO_ODDS,
        shift=0.0,
        deviation=0.0,
    )


REFUSAL = of_length(1)._replace(prices=np.array([0.0, 0.5]), shift=-30.0)
"""Guesses one token and takes none, whatever it is."""


def value_of_longer(
    rule: ChainRule, num_drafted: int, drawn: float, expected: float, extra: float
) -> tuple[float, float]:
    """Returns the best value above its price of drafting on, and its value by the mean; zeros if
    none is positive.

    `drawn`, `expected`: survival of the next token by the draw and by the mean; `extra`: tokens
    that the next one costs in addition to its price.
    """
    best = best_expected = tokens = by_mean = 0.0
    paid = rule.prices[num_drafted] - extra
    for length in range(num_drafted + 1, len(rule.prices)):
        price = rule.prices[length] - paid
        tokens += drawn
        by_mean += expected
        if tokens - price > best + SURELY:
            best, best_expected = tokens - price, by_mean - price
        drawn *= rule.mean
        expected *= rule.mean
    return best, best_expected


def has_value(means: Doubles, prices: Doubles, extra: float) -> npt.NDArray[np.bool_]:
    """Returns for R requests before their first token, of acceptance `means`, whether
    `value_of_longer` is positive; `extra`: as there."""
    survival = means[:, None] ** np.arange(1, len(prices))
    values = np.cumsum(survival, axis=1) - (prices[1:] - prices[0] + extra)
    has_values: npt.NDArray[np.bool_] = (values > SURELY).any(axis=1)
    return has_values


def wants_guess(rule: ChainRule, num_drafted: int, survival: float) -> int:
    """Returns NO, YES, LOOK or PROBE; `survival`: P(all drafted tokens are accepted)."""
    next_survival = survival * rule.mean
    if value_of_longer(rule, num_drafted, next_survival, next_survival, 0.0)[0] > 0.0:
        return YES
    if rule.looks:
        # Only an easy token would be drafted. With equal probability of an easy and a hard token,
        # the easy one has to pay for two guesses.
        hopeful = survival * rule.hopeful
        if value_of_longer(rule, num_drafted, hopeful, hopeful, rule.guess_price)[0] > 0.0:
            return LOOK
    if rule.probes and num_drafted == 0 and len(rule.prices) > 1:
        return PROBE
    return NO


def acceptance(rule: ChainRule, num_drafted: int, gap: float) -> tuple[float, float]:
    """Returns P(the guess is right | all before it are), by the round's draw and by the mean."""
    odds, x = rule.odds, math.log1p(max(gap, 0.0))
    score = odds.bias + odds.depth * num_drafted + (odds.slope + odds.slope_of_slope * x) * x
    p = _straightened(odds.curve, _sigmoid(score))
    score = math.log(p / (1.0 - p)) + rule.shift
    return _sigmoid(score + rule.deviation), _sigmoid(score)


def takes(
    rule: ChainRule, num_drafted: int, drawn: float, expected: float, optimism: float
) -> tuple[bool, float, float]:
    """Returns whether to draft the guess, what of `optimism` that costs, and its value by the mean.

    `drawn`, `expected`: survival of the guess.
    """
    value, by_mean = value_of_longer(rule, num_drafted, drawn, expected, -rule.guess_price)
    if by_mean < 0.0:
        if -by_mean <= optimism:
            return True, -by_mean, by_mean
        value, by_mean = value_of_longer(rule, num_drafted, expected, expected, -rule.guess_price)
    return value > 0.0, 0.0, by_mean


class Follower:
    """Follows a rule along one chain, guess by guess."""

    def __init__(self, rule: ChainRule, *, max_length: int) -> None:
        prices = rule.prices.tolist()  # a list is read several times as fast as an array
        self._rule = rule._replace(prices=prices)
        self._is_free = not any(prices)
        self._max_length = max_length
        self._means: list[float] = []
        self._num_drafted = self._num_looks = 0
        self._looked = self._spent = 0.0
        self._probed = False
        self._survival = self._drawn_survival = 1.0
        self._answer = NO

    def wants_guess(self) -> bool:
        """Returns whether to guess another token; after a guess that was taken, or before any."""
        if self._num_drafted == self._max_length:
            return False
        if self._is_free:
            self._answer = YES if self._num_drafted + 1 < len(self._rule.prices) else NO
            return self._answer != NO
        self._answer = wants_guess(self._rule, self._num_drafted, self._survival)
        return self._answer != NO

    def takes(self, gap: float) -> bool:
        """Returns whether to draft the guess that was wanted."""
        rule, num_drafted = self._rule, self._num_drafted
        if self._is_free and rule.odds is NO_ODDS:  # as `of_length`: nothing depends on the gap
            self._means.append(_FREE_MEAN)
            self._num_drafted += 1
            return True
        drawn, mean = acceptance(rule, num_drafted, gap)
        self._means.append(mean)
        self._drawn_survival *= drawn
        self._survival *= mean
        left = rule.optimism - self._spent
        is_drafted, cost, value = takes(
            rule, num_drafted, self._drawn_survival, self._survival, left
        )
        if self._answer == PROBE:
            is_drafted, cost, self._probed = True, 0.0, True
        if self._answer == LOOK:
            self._num_looks += 1
            self._looked += max(value, 0.0) - rule.guess_price
        self._spent += cost
        self._num_drafted += bool(is_drafted)
        return bool(is_drafted)

    def may_go_on(self) -> bool:
        """Returns whether another guess may be wanted after the present one, if that is taken."""
        return self._num_drafted + 1 < min(self._max_length, len(self._rule.prices) - 1)

    @property
    def takes_any(self) -> bool:
        """True if the rule takes every guess that it wants."""
        return self._is_free

    def report(self) -> ChainReport:
        return ChainReport(
            tuple(self._means),
            self._num_drafted,
            self._num_looks,
            self._looked,
            self._spent,
            self._probed,
        )


def follow(rule: ChainRule, gaps: Sequence[float]) -> ChainReport:
    """Drafts by a rule from guesses that are known, at most one for each gap: what a compiled
    drafter does."""
    chain = Follower(rule, max_length=len(gaps))
    for gap in gaps:
        if not (chain.wants_guess() and chain.takes(gap)):
            break
    return chain.report()


def _sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(min(score, 30.0), -30.0)))


def _straightened(curve: Doubles, forecast: float) -> float:
    """Returns the curve's value at a forecast, within its edges, as `Calibrator.straightened`."""
    y, last = forecast, len(curve) - 1
    if last >= 0:
        right = 0
        while right <= last and curve[right, 0] <= forecast:
            right += 1
        if right == 0 or right > last:
            y = curve[min(right, last), 1]
        else:
            x0, y0 = curve[right - 1, 0], curve[right - 1, 1]
            x1, y1 = curve[right, 0], curve[right, 1]
            y = y0 + (y1 - y0) * (forecast - x0) / (x1 - x0)
    if not y > _EDGE:  # also for nan, from a broken head
        return _EDGE
    return min(y, 1.0 - _EDGE)


PORTABLE = (value_of_longer, wants_guess, acceptance, takes, rule_of, _sigmoid, _straightened)
"""Functions of this module that kernels call; they compile them, since this module is imported
everywhere."""
