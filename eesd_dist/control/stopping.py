"""Stop rules: decide from sampled acceptance probabilities whether to draft one more token.

`BernoulliStop` is the published rule. `OptimalStop` is the cost-aware optimum of one round. They
depend on probabilities and seconds, not on counts, evidence or tokens.
"""

from random import Random
from typing import Protocol

import numpy as np

from eesd_dist.control.chain_rule import NO, ChainRule, of_length, takes, wants_guess
from eesd_dist.control.cost import CostModel


class StopRule(Protocol):
    def begin_round(self, expected: float, hopeful: float) -> None:
        """`expected`: acceptance of a token of which nothing is known; `hopeful`: of the best
        guess that there may be."""
        ...

    def wants_guess(self) -> bool:
        """Returns whether some guess would be drafted."""
        ...

    def goes_on(self, theta: float) -> bool:
        """Returns whether to draft one more token, with theta = P(accepted | all before it are)."""
        ...


class BernoulliStop:
    """Drafts on if chi = 1, with chi ~ Bernoulli(theta).

    With theta known exactly this drafts theta / (1 - theta) tokens on average, at any cost.
    """

    def __init__(self, *, rng: Random) -> None:
        self._rng = rng

    def begin_round(self, expected: float, hopeful: float) -> None:
        return

    def wants_guess(self) -> bool:
        return True

    def goes_on(self, theta: float) -> bool:
        return self._rng.random() < theta


class OptimalStop:
    """Drafts on while some longer draft is worth more than its price, by a `ChainRule`.

    The price of a second is the highest rate of tokens that a round of one length has at the
    expected acceptance; with every theta equal to that, the draft gets this length. It looks ahead
    up to the maximum length, since measured verify times rise in steps: the token that crosses a
    step does not pay, but the ones after it may.
    """

    def __init__(self, *, cost: CostModel, max_draft_tokens: int) -> None:
        self._lengths = np.arange(max_draft_tokens + 1)
        self._seconds = np.array([cost.seconds(length) for length in range(max_draft_tokens + 1)])
        self._guess_s = cost.guess_s if max_draft_tokens else 0.0
        self.begin_round(0.5, 0.5)

    def begin_round(self, expected: float, hopeful: float) -> None:
        rates = (expected**self._lengths).cumsum() / self._seconds
        self.best_length = int(rates.argmax())
        """Draft length of the highest rate at the expected acceptance."""
        rate = float(rates[self.best_length])
        self._prices = rate * (self._seconds - self._seconds[0])
        self._rule = of_length(0)._replace(
            prices=self._prices.tolist(),  # a list is read several times as fast as an array
            guess_price=rate * self._guess_s,
            mean=expected,
            hopeful=hopeful,
            looks=hopeful > expected,
        )
        self._num_drafted, self._survival = 0, 1.0

    def wants_guess(self) -> bool:
        return wants_guess(self._rule, self._num_drafted, self._survival) != NO

    def goes_on(self, theta: float) -> bool:
        self._survival *= theta
        is_drafted, _, _ = takes(self._rule, self._num_drafted, self._survival, self._survival, 0.0)
        self._num_drafted += is_drafted
        return bool(is_drafted)

    @property
    def rule(self) -> ChainRule:
        """The decisions of this round, for any theta."""
        return self._rule._replace(prices=self._prices)
