"""Which of a round's possible tokens to draft, given what each is expected to earn.

A possible token has a chance to survive: that it and all before it are accepted. Rows and draft
steps cost seconds, and a second is worth `rate` tokens. Tokens are added in order of survival, of
all requests together, and the number of them that earns most above its price is kept: D-cut (arXiv
2607.14647) and DSpark (2607.05147) add while the batch's rate rises; going through the whole order
instead finds what lies behind a step of the cost table. Knows no requests and no beliefs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Entry = tuple[float, int, int, float]
"""A possible token: less its survival, levels from now, its owner, less its expected survival.

Sorted, the likeliest comes first, a parent before its child, and of equals the lower owner's. Only
tokens of level 0 are decided, the others are looked ahead to. The last figure is survival by the
mean of what is believed, where the first is by a draw of it."""


@dataclass(slots=True, kw_only=True)
class Prices:
    """What more tokens would cost a round as it stands now."""

    rate: float
    """Tokens a second is worth."""
    first_s: Sequence[float]
    """Seconds of a level of 0, 1, 2, ... tokens, for the level that is decided."""
    later_s: Sequence[float]
    """The same for the levels after it."""
    verify_s: Sequence[float]
    """Seconds of the verify pass with 0, 1, 2, ... more rows than it has."""
    drafting_s: float
    """Of this round so far."""
    overlapped: bool
    """The slower of drafting and verifying counts, not both."""

    def start(self) -> float:
        return self._both(self.drafting_s, self.verify_s[0])

    def _both(self, drafting_s: float, verifying_s: float) -> float:
        if self.overlapped:
            return max(drafting_s, verifying_s)
        return drafting_s + verifying_s


class Allocation(NamedTuple):
    """What is taken, and what it earns above its price, in tokens."""

    owners: frozenset[int]
    """Those whose token of the level that is decided is taken."""
    value: float
    expected_value: float
    """By the mean of what is believed."""


NOTHING = Allocation(frozenset(), 0.0, 0.0)
_FIRST = frozenset((0,))
_SURELY = 1e-12
"""What must be earned at least: of equals the shorter is taken."""


def best_chain(
    survival: float, expected: float, *, theta: float, levels: int, prices: Prices
) -> Allocation:
    """One possible token and those it may lead to, each accepted with probability theta: what
    `best_allocation` says of them, in a quarter of the time."""
    rate, verify_s, overlapped = prices.rate, prices.verify_s, prices.overlapped
    drafting, start = prices.drafting_s + prices.first_s[1] - prices.first_s[0], prices.start()
    step = prices.later_s[1] - prices.later_s[0]
    best = best_expected = tokens = by_mean = 0.0
    for size in range(1, levels + 1):
        verifying = verify_s[size]
        seconds = max(drafting, verifying) if overlapped else drafting + verifying
        price = rate * (seconds - start)
        tokens += survival
        by_mean += expected
        if tokens - price > best + _SURELY:
            best, best_expected = tokens - price, by_mean - price
        survival *= theta
        expected *= theta
        drafting += step
    return Allocation(_FIRST, best, best_expected) if best else NOTHING


def best_allocation(order: Sequence[Entry], prices: Prices) -> Allocation:
    """What earns most of a sorted order: a prefix of it, of as many levels as pays.

    A level has a price of its own whatever is on it, so that every number of levels is tried: the
    first entry of a level that does not pay would keep away all less likely ones before it.
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
    """The prefix of highest value; the shortest among equals, maybe none."""
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
