"""Chooses which of a round's possible tokens to draft, by their expected value.

The survival of a possible token is the probability that it and all before it are accepted. Rows and
draft steps cost seconds, and a second is worth `rate` tokens. The tokens of all requests are added
in order of survival, and the prefix with the highest value above its price is kept: D-cut (arXiv
2607.14647) and DSpark (2607.05147) add while the batch's rate rises; trying the whole order also
finds gains after a step of the cost table. Does not depend on requests or beliefs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Entry = tuple[float, int, int, float]
"""A possible token: negative survival, levels from now, owner, negative expected survival.

Sorted, the likeliest token comes first, a parent before its child, and of equals the lower owner.
Only tokens of level 0 are decided; the others are a look-ahead. Survival is by a Thompson draw,
expected survival by the mean of the belief."""


@dataclass(slots=True, kw_only=True)
class Prices:
    """Prices of adding tokens to a round in its present state."""

    rate: float
    """Value of a second, in tokens."""
    first_s: Sequence[float]
    """Seconds of the level being decided, with 0, 1, 2, ... tokens."""
    later_s: Sequence[float]
    """Seconds of each later level, with 0, 1, 2, ... tokens."""
    verify_s: Sequence[float]
    """Seconds of the verify pass with 0, 1, 2, ... additional rows."""
    drafting_s: float
    """Seconds of drafting in this round so far."""
    overlapped: bool
    """Whether the longer of drafting and verifying counts, not both."""

    def start(self) -> float:
        return self._both(self.drafting_s, self.verify_s[0])

    def _both(self, drafting_s: float, verifying_s: float) -> float:
        if self.overlapped:
            return max(drafting_s, verifying_s)
        return drafting_s + verifying_s


class Allocation(NamedTuple):
    """Tokens that are taken, and their value above their price, in tokens."""

    owners: frozenset[int]
    """Owners of the taken tokens of the level being decided."""
    value: float
    expected_value: float
    """Value by the mean of the belief."""


NOTHING = Allocation(frozenset(), 0.0, 0.0)
_SURELY = 1e-12
"""Minimum gain in value: of equal prefixes the shorter is taken."""


def best_allocation(order: Sequence[Entry], prices: Prices) -> Allocation:
    """Returns the prefix with the highest value of a sorted order, over all numbers of levels.

    Every number of levels is tried, since a level has a fixed price: the first entry of a level
    that does not pay would otherwise exclude later entries of the levels before it.
    """
    levels = 1 + max((level for _, level, _, _ in order), default=-1)
    best = _best_prefix(order, prices, levels=levels)
    for fewer in range(1, levels):
        some = [entry for entry in order if entry[1] < fewer]
        found = _best_prefix(some, prices, levels=fewer)
        if found.value > best.value:
            best = found
    return best


def _best_prefix(order: Sequence[Entry], prices: Prices, *, levels: int) -> Allocation:
    """Returns the prefix with the highest value, the shortest of equals; it may be empty."""
    rate, verify_s, overlapped = prices.rate, prices.verify_s, prices.overlapped
    first_s, later_s = prices.first_s, prices.later_s
    drafting, start = prices.drafting_s, prices.start()
    counts = [0] * levels
    best_size, best, best_expected = 0, 0.0, 0.0
    tokens = expected = 0.0
    for size, (minus_survival, level, _, minus_expected) in enumerate(order, start=1):
        count = counts[level]
        counts[level] = count + 1
        steps = later_s if level else first_s
        drafting += steps[count + 1] - steps[count]
        verifying = verify_s[size]
        if overlapped:
            price = rate * ((drafting if drafting > verifying else verifying) - start)
        else:
            price = rate * (drafting + verifying - start)
        tokens -= minus_survival
        expected -= minus_expected
        if tokens - price > best + _SURELY:
            best_size, best, best_expected = size, tokens - price, expected - price
    if not best_size:
        return NOTHING
    owners = frozenset(entry[2] for entry in order[:best_size] if not entry[1])
    return Allocation(owners, best, best_expected)
