"""Published controllers of the draft length, as baselines.

    fixed         the same length every round
    threshold     stop when the exit head is unsure (Kangaroo, arXiv 2404.18911)
    draft_verify  Draft&Verify's moving threshold (Zhang et al. 2023, arXiv 2309.08168)
    ema           SGLang's adaptive number of steps (its pull request 21599)
    ucb           UCBSpec (BanditSpec, Hou et al. 2025, arXiv 2505.15141), lengths as arms

Written from their descriptions, with the constants of their code. Each decides for one request;
where the original has one state for a whole batch, here every request has a separate one. All are
deterministic.
"""

import math
from collections.abc import Sequence
from random import Random

from eesd_dist.control.base import Controller, ControlSetup
from eesd_dist.control.belief import Belief
from eesd_dist.control.cost import CostModel
from eesd_dist.types import Evidence, Outcome


def fixed(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    return FixedController(length=setup.speculation.fixed_length)


def threshold(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    return ThresholdController(eta=setup.speculation.threshold)


def draft_verify(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    config = setup.speculation
    return DraftVerifyController(gamma=config.threshold, max_draft_tokens=config.max_draft_tokens)


def ema(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    return EmaController(max_draft_tokens=setup.speculation.max_draft_tokens)


def ucb(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    config = setup.speculation
    return UcbController(
        cost=setup.assumed_cost,
        max_draft_tokens=config.max_draft_tokens,
        discount=config.discount,
    )


class FixedController:
    """Drafts the same length every round."""

    needs_evidence = needs_probs = False

    def __init__(self, *, length: int) -> None:
        self._length = length
        self._drafted = 0

    def begin_round(self) -> None:
        self._drafted = 0

    def keep_drafting(self, evidence: Evidence) -> bool:
        goes_on = self._drafted < self._length
        self._drafted += goes_on
        return goes_on

    def observe(self, outcome: Outcome) -> None:
        return


class ThresholdController:
    """Stops when the exit head's top-1 probability falls below eta (Kangaroo's rule)."""

    needs_evidence = needs_probs = True

    def __init__(self, *, eta: float) -> None:
        self._eta = eta

    def begin_round(self) -> None:
        return

    def keep_drafting(self, evidence: Evidence) -> bool:
        return evidence.top1_prob >= self._eta

    def observe(self, outcome: Outcome) -> None:
        return


class DraftVerifyController:
    """Drafts until a token's top-1 probability is below gamma; that token is still verified.

    gamma is adapted to a target acceptance alpha. After every round, with AR its accepted share:

        mean AR <- b1 mean AR + (1 - b1) AR
        gamma'  =  gamma + e   where mean AR < alpha
                   gamma - e   otherwise; gamma where the draft had the maximum length
        gamma   <- b2 gamma + (1 - b2) gamma'

    with alpha = 0.9, b1 = 0.5, b2 = 0.9 and e = 0.01.
    """

    needs_evidence = needs_probs = True

    def __init__(
        self,
        *,
        gamma: float,
        max_draft_tokens: int,
        target: float = 0.9,
        memory: float = 0.5,
        gamma_memory: float = 0.9,
        step: float = 0.01,
    ) -> None:
        self._gamma = gamma
        self._ceiling = max_draft_tokens
        self._target = target
        self._memory = memory
        self._gamma_memory = gamma_memory
        self._step = step
        self._mean_share = 0.0
        self._was_unsure = False

    @property
    def gamma(self) -> float:
        return self._gamma

    def begin_round(self) -> None:
        self._was_unsure = False

    def keep_drafting(self, evidence: Evidence) -> bool:
        if self._was_unsure:
            return False
        self._was_unsure = evidence.top1_prob < self._gamma
        return True

    def observe(self, outcome: Outcome) -> None:
        if not outcome.num_drafted:
            return
        share = outcome.num_accepted / outcome.num_drafted
        self._mean_share = self._memory * self._mean_share + (1.0 - self._memory) * share
        aim = self._gamma
        if self._mean_share < self._target:
            aim += self._step
        elif outcome.num_drafted < self._ceiling:
            aim -= self._step
        self._gamma = self._gamma_memory * self._gamma + (1.0 - self._gamma_memory) * aim


class EmaController:
    """Drafts one step beyond the moving average of accepted lengths, on a ladder of lengths.

        ema <- (1 - a) ema + a accepted

    and, every `interval` rounds after `warm_up`, down the ladder while ema <= lower - 0.5 - 0.25
    and up while ema > current - 0.5; a = 0.2, interval 5, warm-up 10, ladder 1, 3, 7.
    """

    needs_evidence = needs_probs = False

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        ladder: Sequence[int] = (1, 3, 7),
        alpha: float = 0.2,
        interval: int = 5,
        warm_up: int = 10,
        down_hysteresis: float = -0.25,
        up_hysteresis: float = 0.0,
    ) -> None:
        self._ladder = [step for step in ladder if step <= max_draft_tokens] or [max_draft_tokens]
        self._at = len(self._ladder) // 2
        self._ema = float(self._ladder[self._at] - 1)
        self._alpha = alpha
        self._interval = interval
        self._warm_up = warm_up
        self._down = down_hysteresis
        self._up = up_hysteresis
        self._rounds = 0
        self._drafted = 0

    @property
    def length(self) -> int:
        return self._ladder[self._at]

    def begin_round(self) -> None:
        self._drafted = 0

    def keep_drafting(self, evidence: Evidence) -> bool:
        goes_on = self._drafted < self.length
        self._drafted += goes_on
        return goes_on

    def observe(self, outcome: Outcome) -> None:
        if not outcome.num_drafted:
            return
        self._ema += self._alpha * (outcome.num_accepted - self._ema)
        self._rounds += 1
        beyond = self._rounds - self._warm_up
        if beyond > 0 and beyond % self._interval == 0:
            self._climb()

    def _climb(self) -> None:
        ladder = self._ladder
        while self._at > 0 and self._ema <= ladder[self._at - 1] - 0.5 + self._down:
            self._at -= 1
        while self._at < len(ladder) - 1 and self._ema > ladder[self._at] - 0.5 + self._up:
            self._at += 1


class UcbController:
    """Drafts the length with the highest upper confidence bound on its tokens per second.

        index(k) = tokens(k) / seconds(k) + B sqrt(x log n / n(k))

    Sums and counts are discounted (Garivier and Moulines 2011), since text changes; seconds are the
    cost model's, B the rate of plain decoding and x = 0.5. Length 0 is an ordinary arm. A round
    updates its own arm only, as in the paper, although it has information on others (HedgeSpec,
    arXiv 2510.20064).
    """

    needs_evidence = needs_probs = False

    def __init__(
        self,
        *,
        cost: CostModel,
        max_draft_tokens: int,
        discount: float,
        exploration: float = 0.5,
    ) -> None:
        self._cost = cost
        self._discount = discount
        self._exploration = exploration
        self._counts = [0.0] * (max_draft_tokens + 1)
        self._tokens = [0.0] * (max_draft_tokens + 1)
        self._length = 0
        self._drafted = 0

    def begin_round(self) -> None:
        self._drafted = 0
        self._length = max(range(len(self._counts)), key=lambda k: (self._index(k), -k))

    def keep_drafting(self, evidence: Evidence) -> bool:
        goes_on = self._drafted < self._length
        self._drafted += goes_on
        return goes_on

    def observe(self, outcome: Outcome) -> None:
        self._counts = [self._discount * count for count in self._counts]
        self._tokens = [self._discount * tokens for tokens in self._tokens]
        length = self._drafted if outcome.branches else outcome.num_drafted  # a tree's depth
        arm = min(length, len(self._counts) - 1)
        self._counts[arm] += 1.0
        self._tokens[arm] += 1.0 + outcome.num_accepted

    def _index(self, length: int) -> float:
        count = self._counts[length]
        if count < 1e-3:
            return math.inf
        mean = self._tokens[length] / (count * self._cost.seconds(length))
        explored = math.log(max(sum(self._counts), 1.0))
        scale = 1.0 / self._cost.seconds(0)
        return mean + scale * math.sqrt(self._exploration * explored / count)
