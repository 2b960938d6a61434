"""Beliefs: what has been learnt from a request's rounds, as three plain numbers.

Updates counts from an outcome, discounts, scales and pools them. Does not depend on how a length is
chosen from them (controllers) or where they are kept (`routing.beliefs`).

Censoring: of k drafted tokens with r accepted, the first r were judged good and, when r < k, the
next one was judged bad. Later tokens were never judged and are not counted; counting k - r failures
would bias every estimate down. Of a tree the exit head's first choices count, where the verdict
reached them.
"""

import math
from collections.abc import Mapping

from eesd_dist.errors import ConfigError
from eesd_dist.types import Outcome, Value

_UNIFORM = 1.0
"""Both parameters of the uniform prior; the excess over it are counts, which are discounted."""


class Belief(Value, frozen=True, kw_only=True):
    """Beta posterior of "the next drafted token is accepted", and the counts it is based on."""

    alpha: float = _UNIFORM
    beta: float = _UNIFORM
    num_rounds: int = 0

    @property
    def mean(self) -> float:
        return self.alpha / (self.alpha + self.beta)

    @property
    def weight(self) -> float:
        """Number of judged tokens that this belief is worth."""
        return max(self.alpha + self.beta - 2 * _UNIFORM, 0.0)

    def after(self, outcome: Outcome, *, discount: float = 1.0) -> "Belief":
        """Returns the posterior after one more round; earlier counts are multiplied by `discount`.

        A round without a draft adds no counts and still discounts: a controller that stopped
        drafting becomes uncertain, and tries again.
        """
        accepted, rejected = outcome.num_first_accepted, outcome.num_first_rejected
        return Belief(
            alpha=_UNIFORM + discount * (self.alpha - _UNIFORM) + accepted,
            beta=_UNIFORM + discount * (self.beta - _UNIFORM) + rejected,
            num_rounds=self.num_rounds + 1,
        )

    def scaled(self, factor: float) -> "Belief":
        """Returns the same belief with `factor` times the weight."""
        return Belief(
            alpha=_UNIFORM + factor * (self.alpha - _UNIFORM),
            beta=_UNIFORM + factor * (self.beta - _UNIFORM),
            num_rounds=self.num_rounds,
        )

    def bounded(self, max_weight: float) -> "Belief":
        """Returns the same belief with at most `max_weight`, so that new rounds can change it."""
        return self if self.weight <= max_weight else self.scaled(max_weight / self.weight)

    def merged(self, other: "Belief") -> "Belief":
        """Returns the belief with the counts of both."""
        return Belief(
            alpha=self.alpha + other.alpha - _UNIFORM,
            beta=self.beta + other.beta - _UNIFORM,
            num_rounds=self.num_rounds + other.num_rounds,
        )

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__struct_fields__}

    @staticmethod
    def from_json(data: Mapping[str, object]) -> "Belief":
        numbers = {name: _number(data, name) for name in Belief.__struct_fields__}
        if numbers["alpha"] <= 0 or numbers["beta"] <= 0:
            raise ConfigError(f"belief: found {dict(data)}, expected positive alpha and beta")
        return Belief(
            alpha=numbers["alpha"],
            beta=numbers["beta"],
            num_rounds=int(numbers["num_rounds"]),
        )


def _number(data: Mapping[str, object], name: str) -> float:
    value = data.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"belief: found {name}={value!r}, expected a number that is not negative")
    return float(value)
