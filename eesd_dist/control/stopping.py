"""Stop rules: decide from sampled acceptance probabilities whether to draft one more token.

`BernoulliStop` is the published rule. `OptimalStop` is the cost-aware optimum of one round. They
depend on probabilities and seconds, not on counts, evidence or tokens.
"""

from random import Random
from typing import Protocol

from eesd_dist.control.cost import CostModel


class StopRule(Protocol):
    def begin_round(self) -> None: ...
    def goes_on(self, theta: float) -> bool:
        """Returns whether to draft one more token, with theta = P(accepted | all before it are)."""
        ...


class BernoulliStop:
    """Drafts on if chi = 1, with chi ~ Bernoulli(theta).

    With theta known exactly this drafts theta / (1 - theta) tokens on average, at any cost.
    """

    def __init__(self, *, rng: Random) -> None:
        self._rng = rng

    def begin_round(self) -> None:
        return

    def goes_on(self, theta: float) -> bool:
        return self._rng.random() < theta


class OptimalStop:
    """Drafts on while some longer draft has a higher rate than the best so far.

    For one more token this is S_{k+1} / (c + v(k+1) - v(k)) > best rate so far. It looks ahead up
    to the maximum length, with the next token's theta for later ones, since measured verify times
    rise in steps: the token that crosses a step does not pay, but the ones after it may.
    """

    def __init__(self, *, cost: CostModel, max_draft_tokens: int) -> None:
        self._cost = cost
        self._ceiling = max_draft_tokens
        self.begin_round()

    def begin_round(self) -> None:
        self._drafted = 0
        self._survival = 1.0
        self._tokens = 1.0
        self._best_rate = 1.0 / self._cost.seconds(0)

    def goes_on(self, theta: float) -> bool:
        if not self._some_longer_draft_pays(theta):
            return False
        self._drafted += 1
        self._survival *= theta
        self._tokens += self._survival
        rate = self._tokens / self._cost.seconds(self._drafted)
        self._best_rate = max(self._best_rate, rate)
        return True

    def _some_longer_draft_pays(self, theta: float) -> bool:
        survival, tokens = self._survival, self._tokens
        for length in range(self._drafted + 1, self._ceiling + 1):
            survival *= theta
            tokens += survival
            if tokens > self._best_rate * self._cost.seconds(length):
                return True
        return False
