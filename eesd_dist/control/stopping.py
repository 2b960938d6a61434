"""Stop rules: decide from sampled acceptance probabilities whether to draft one more token.

`BernoulliStop` is the published rule. `OptimalStop` is the cost-aware optimum of one round;
`SteadyStop` that of a long sequence of rounds. They depend on probabilities and seconds, not on
counts, evidence or tokens.
"""

from random import Random
from typing import Protocol

from eesd_dist.control.cost import CostModel
from eesd_dist.types import Outcome


class StopRule(Protocol):
    def begin_round(self) -> None: ...
    def goes_on(self, theta: float) -> bool:
        """Returns whether to draft one more token, with theta = P(accepted | all before it are)."""
        ...

    def observe(self, outcome: Outcome) -> None: ...


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

    def observe(self, outcome: Outcome) -> None:
        return


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

    def observe(self, outcome: Outcome) -> None:
        return

    def _some_longer_draft_pays(self, theta: float) -> bool:
        survival, tokens = self._survival, self._tokens
        for length in range(self._drafted + 1, self._ceiling + 1):
            survival *= theta
            tokens += survival
            if tokens > self._best_rate * self._cost.seconds(length):
                return True
        return False


class SteadyStop:
    """Drafts on while the next tokens have a higher rate than this request has on average.

    A request is a sequence of rounds, with all its tokens over all its seconds as the objective.
    The optimal policy for that (renewal reward; Dinkelbach's iteration) compares each marginal rate
    with the long-run rate g instead of with this round's: hard rounds stop sooner, easy ones
    continue longer. g is estimated from the outcomes with the same cost model, and starts at the
    rate that the belief predicts.
    """

    def __init__(
        self, *, cost: CostModel, max_draft_tokens: int, theta: float, memory: float = 0.95
    ) -> None:
        self._cost = cost
        self._ceiling = max_draft_tokens
        self._memory = memory
        rate = cost.best_rate(theta=theta, max_draft_tokens=max_draft_tokens)
        self._seconds = 8 * cost.seconds(0)  # the prior has the weight of eight plain rounds
        self._tokens = rate * self._seconds
        self.begin_round()

    @property
    def rate(self) -> float:
        """g, in tokens per second; at least the rate of plain decoding."""
        return max(self._tokens / self._seconds, 1.0 / self._cost.seconds(0))

    def begin_round(self) -> None:
        self._drafted = 0
        self._survival = 1.0

    def goes_on(self, theta: float) -> bool:
        if not self._some_longer_draft_pays(theta):
            return False
        self._drafted += 1
        self._survival *= theta
        return True

    def observe(self, outcome: Outcome) -> None:
        self._tokens = self._memory * self._tokens + 1 + outcome.num_accepted
        steps = self._drafted if outcome.branches else outcome.num_drafted
        spent = self._cost.seconds(steps) + (
            self._cost.verify(outcome.num_drafted) - self._cost.verify(steps)
        )
        self._seconds = self._memory * self._seconds + spent

    def _some_longer_draft_pays(self, theta: float) -> bool:
        spent, rate = self._cost.seconds(self._drafted), self.rate
        survival, gained = self._survival, 0.0
        for length in range(self._drafted + 1, self._ceiling + 1):
            survival *= theta
            gained += survival
            if gained > rate * (self._cost.seconds(length) - spent):
                return True
        return False
