"""Which of a round's possible tokens to draft, given what each is expected to earn.

A possible token has a chance to survive: that it and all before it are accepted. Rows and draft
steps cost seconds, and a second is worth `rate` tokens. Tokens are added in order of survival, of
all requests together, and the number of them that earns most above its price is kept: D-cut (arXiv
2607.14647) and DSpark (2607.05147) add while the batch's rate rises; going through the whole order
instead finds what lies behind a step of the cost table. Refuses to know requests and beliefs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Entry(NamedTuple):
    """A possible token. Sorted, the likeliest comes first and a parent before its child."""

    minus_survival: float
    level: int
    """Levels from now; only those of level 0 are decided, the others are looked ahead to."""
    owner: int
    """Whose token it is; at equal survival the lower comes first."""
    minus_expected: float
    """Survival by the mean of what is believed, where `minus_survival` is by a draw of it."""


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
    """So many first entries of the order, and what they earn above their price, in tokens."""

    size: int
    value: float
    expected_value: float
    """By the mean of what is believed."""


def best_prefix(order: Sequence[Entry], prices: Prices) -> Allocation:
    """The prefix of a sorted order of highest value; the shortest among equals, maybe none."""
    rate, verify_s, overlapped = prices.rate, prices.verify_s, prices.overlapped
    first_s, later_s = prices.first_s, prices.later_s
    drafting, start = prices.drafting_s, prices.start()
    counts: dict[int, int] = {}
    best = Allocation(0, 0.0, 0.0)
    tokens = expected = 0.0
    for size, (minus_survival, level, _, minus_expected) in enumerate(order, start=1):
        count = counts.get(level, 0)
        counts[level] = count + 1
        steps = first_s if level == 0 else later_s
        drafting += steps[count + 1] - steps[count]
        verifying = verify_s[size]
        seconds = max(drafting, verifying) if overlapped else drafting + verifying
        tokens -= minus_survival
        expected -= minus_expected
        price = rate * (seconds - start)
        if tokens - price > best.value + 1e-12:
            best = Allocation(size, tokens - price, expected - price)
    return best
