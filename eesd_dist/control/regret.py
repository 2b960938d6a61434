"""Computes regret from logs: the tokens per second that other draft lengths would have had.

Verifying a draft of k tokens with r accepted determines what every other length would have yielded:
min(r, j) for j <= k, and r for a longer one if a token was rejected. Only lengths beyond a draft
that was accepted completely are censored. The oracle (the accepted count of each round) and the
best fixed length in hindsight can therefore be computed from outcomes and a cost model, without
another run.

Acceptance beyond a censored draft is estimated from the rounds that got that far (the product of
conditional acceptance rates, Kaplan and Meier 1958). If a controller stops where it expects a
rejection, that estimate is biased up, against the controller.

Rounds that drafted a tree are left out: with another length they would have drafted another tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from eesd_dist.control.cost import CostModel
from eesd_dist.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """Tokens per second by the cost model: achieved, and achievable in hindsight."""

    rate: float
    plain_rate: float
    oracle_rate: float
    """Rate if every round had drafted exactly its accepted tokens."""
    best_fixed_length: int
    best_fixed_rate: float
    fixed_rates: tuple[float, ...]
    """Index is the length; 0 is plain decoding."""

    @property
    def oracle_regret(self) -> float:
        """Share of the oracle's rate that was not achieved."""
        return 1.0 - self.rate / self.oracle_rate

    @property
    def over_best_fixed(self) -> float:
        return self.rate / self.best_fixed_rate


def oracle_length(outcome: Outcome) -> int:
    """Returns the shortest draft with the same yield; a lower bound if all was accepted."""
    return outcome.num_accepted


def position_rates(outcomes: Sequence[Outcome], *, max_length: int) -> tuple[float, ...]:
    """Returns the acceptance of draft position i among the rounds that tested it; 0 if none did."""
    tested, accepted = [0] * max_length, [0] * max_length
    for outcome in _chains(outcomes):
        judged = min(outcome.num_drafted, outcome.num_accepted + 1)
        for position in range(min(judged, max_length)):
            tested[position] += 1
            accepted[position] += position < outcome.num_accepted
    return tuple(a / t if t else 0.0 for a, t in zip(accepted, tested, strict=True))


def hindsight(outcomes: Sequence[Outcome], *, cost: CostModel, max_length: int) -> Hindsight:
    """Computes the rates of a logged sequence of rounds."""
    outcomes = _chains(outcomes)
    tokens = sum(1 + outcome.num_accepted for outcome in outcomes)
    spent = sum(cost.seconds(outcome.num_drafted) for outcome in outcomes)
    at_best = sum(cost.seconds(oracle_length(outcome)) for outcome in outcomes)
    survival = tuple(accumulate(position_rates(outcomes, max_length=max_length), mul))
    fixed = tuple(cost.rate(length, survival) for length in range(max_length + 1))
    best = max(range(max_length + 1), key=lambda length: (fixed[length], -length))
    plain = 1.0 / cost.seconds(0)
    return Hindsight(
        rate=tokens / spent if spent else plain,
        plain_rate=plain,
        oracle_rate=tokens / at_best if at_best else plain,
        best_fixed_length=best,
        best_fixed_rate=fixed[best],
        fixed_rates=fixed,
    )


def _chains(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.branches]
