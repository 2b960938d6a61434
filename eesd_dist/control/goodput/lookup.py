"""Chooses the source of a draft: the exit head, or tokens found by prompt lookup.

Each source is an arm of Thompson sampling over its gain: accepted tokens above the price of the
seconds they cost. The head's gain is measured, round by round. A lookup's is forecast for its best
length from how often tokens were right after a context of that length, which measured rounds have
taught as Beta counts. Does not depend on tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from eesd_dist.types import Outcome

_CONTEXTS = (3, 4, 6, 9)
"""First context of each class but the lowest."""
_PRIOR_MEANS = (0.35, 0.5, 0.6, 0.75, 0.85)
_PRIOR_WEIGHT, _POOL_WEIGHT = 2.0, 6.0
"""Judged tokens that the prior is worth, and all requests together at most."""
_OWN_MEMORY, _POOL_MEMORY = 0.95, 0.995
"""Discounts per draft."""
_HEAD_MEMORY, _HEAD_POOL_MEMORY, _HEAD_PRIOR = 0.9, 0.99, 4.0
_HEAD_STD = 1.5
"""Standard deviation of one round's gain, in tokens."""


def class_of(context: int) -> int:
    """Returns the class of a context's length."""
    return sum(context >= first for first in _CONTEXTS)


@dataclass(slots=True)
class Hits:
    """Discounted counts of judged tokens."""

    accepted: float = 0.0
    rejected: float = 0.0

    def add(self, outcome: Outcome, memory: float) -> None:
        rejected = outcome.num_accepted < outcome.num_drafted
        self.accepted = memory * self.accepted + outcome.num_accepted
        self.rejected = memory * self.rejected + rejected


@dataclass(slots=True)
class Gain:
    """Discounted mean gain of the head's drafts, in tokens a round."""

    mean: float = 0.0
    weight: float = 0.0

    def add(self, gain: float, memory: float) -> None:
        self.weight = memory * self.weight + 1.0
        self.mean += (gain - self.mean) / self.weight


def _all_hits() -> list[Hits]:
    return [Hits() for _ in _PRIOR_MEANS]


@dataclass(slots=True, kw_only=True, eq=False)
class RequestSources:
    """Observations from one request's rounds."""

    hits: list[Hits] = field(default_factory=_all_hits)
    head: Gain = field(default_factory=Gain)
    context_class: int = 0
    """Context class of its lookup that has no verdict yet."""


class Sources:
    """The arms of one engine's requests."""

    def __init__(self) -> None:
        self._hits = _all_hits()
        self._head = Gain()

    def length(
        self, request: RequestSources, context: int, prices: Sequence[float], rng: Random
    ) -> int:
        """Returns how many tokens of a lookup to draft; 0: the head drafts.

        `prices`: price in tokens of 0, 1, 2, ... drafted ones.
        """
        request.context_class = class_of(context)
        theta = self._acceptance(request, request.context_class, rng)
        length, gain, tokens, survival = 0, 0.0, 0.0, 1.0
        for count, price in enumerate(prices):
            if count:
                survival *= theta
                tokens += survival
            if tokens - price > gain:
                length, gain = count, tokens - price
        return length if length and gain > self._head_gain(request, rng) else 0

    def observe_lookup(self, request: RequestSources, outcome: Outcome) -> None:
        hits = request.hits[request.context_class], self._hits[request.context_class]
        for counts, memory in zip(hits, (_OWN_MEMORY, _POOL_MEMORY), strict=True):
            counts.add(outcome, memory)

    def observe_head(self, request: RequestSources, gain: float) -> None:
        request.head.add(gain, _HEAD_MEMORY)
        self._head.add(gain, _HEAD_POOL_MEMORY)

    def _acceptance(self, request: RequestSources, context_class: int, rng: Random) -> float:
        """Draws P(a token after such a context is right)."""
        mean, pool, own = _PRIOR_MEANS[context_class], self._hits[context_class], request.hits
        total = pool.accepted + pool.rejected
        share = min(_POOL_WEIGHT / total, 1.0) if total else 0.0
        alpha = _PRIOR_WEIGHT * mean + share * pool.accepted + own[context_class].accepted
        beta = _PRIOR_WEIGHT * (1.0 - mean) + share * pool.rejected + own[context_class].rejected
        return rng.betavariate(alpha, beta)

    def _head_gain(self, request: RequestSources, rng: Random) -> float:
        """Draws the head's gain in the next round."""
        prior = min(self._head.weight, _HEAD_PRIOR)
        weight = prior + request.head.weight
        if not weight:
            return 0.0
        mean = (prior * self._head.mean + request.head.weight * request.head.mean) / weight
        return max(rng.gauss(mean, _HEAD_STD / math.sqrt(weight)), 0.0)
