"""How long to keep drafting.

A controller is asked before every draft token whether one more is worth drawing, and is told after
every round how the verifier judged the draft. It sees counts and the exit head's evidence, never
tensors, clocks or requests; the same seed gives the same choices. Whatever it says changes time
alone: every token is the verifier's.

    fixed        the same length every round
    threshold    stop when the exit head is unsure (Kangaroo, arXiv 2404.18911)
    beta         Beta-TS: theta ~ Beta(alpha, beta)
    calibration  Calibration-TS: theta from the calibrated probability of this very token, mixed
                 with the request's own counts, in a gaussian (a) or a beta form (b)
    goodput      ours: by tokens per second of the whole batch (`goodput`)
    draft_verify, ema, ucb   other people's (`baselines`)

The Thompson controllers are a posterior (what theta may be) and a stop rule (what length follows).
"""

import math
from random import Random
from typing import Literal, Protocol

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.baselines import DraftVerifyController, EmaController, UcbController
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import NOMINAL_COST, CostModel
from eesd_dist.control.draws import Deviate
from eesd_dist.control.goodput.controller import Goodput, GoodputController
from eesd_dist.control.stopping import BernoulliStop, OptimalStop, SteadyStop, StopRule
from eesd_dist.errors import ConfigError
from eesd_dist.types import ControllerName, Evidence, Outcome, RequestId

_ALONE = RequestId("alone")


class Controller(Protocol):
    @property
    def needs_evidence(self) -> bool:
        """False lets the drafter skip computing it; what it then passes is not looked at."""
        ...

    def begin_round(self) -> None:
        """Before the first question of every round."""
        ...

    def keep_drafting(self, evidence: Evidence) -> bool:
        """Whether to draft the token this evidence is about."""
        ...

    def observe(self, outcome: Outcome) -> None: ...
    def belief(self) -> Belief: ...


class Posterior(Protocol):
    """What the acceptance probability of the next token may be, given belief and evidence."""

    @property
    def needs_evidence(self) -> bool: ...
    def theta(self, belief: Belief, evidence: Evidence, chance: Deviate) -> float: ...


class FixedController:
    """The same length every round; keeps a belief for whoever reads it."""

    def __init__(self, *, length: int, belief: Belief, discount: float) -> None:
        self._length = length
        self._belief = belief
        self._discount = discount
        self._drafted = 0

    @property
    def needs_evidence(self) -> bool:
        return False

    def begin_round(self) -> None:
        self._drafted = 0

    def keep_drafting(self, evidence: Evidence) -> bool:
        goes_on = self._drafted < self._length
        self._drafted += goes_on
        return goes_on

    def observe(self, outcome: Outcome) -> None:
        self._belief = self._belief.after(outcome, discount=self._discount)

    def belief(self) -> Belief:
        return self._belief


class ThresholdController:
    """Stop when the exit head's top-1 probability falls below eta (Kangaroo's rule)."""

    def __init__(self, *, eta: float, belief: Belief, discount: float) -> None:
        self._eta = eta
        self._belief = belief
        self._discount = discount

    @property
    def needs_evidence(self) -> bool:
        return True

    def begin_round(self) -> None:
        return

    def keep_drafting(self, evidence: Evidence) -> bool:
        return evidence.top1_prob >= self._eta

    def observe(self, outcome: Outcome) -> None:
        self._belief = self._belief.after(outcome, discount=self._discount)

    def belief(self) -> Belief:
        return self._belief


class ThompsonController:
    """Sample what acceptance may be, then act as if it were so.

    `redraw: token` draws new chance for every token. `redraw: round` draws it once: Beta-TS then
    has one theta for the round, so that P(continue k times) = prod_{i<k} (alpha+i)/(alpha+beta+i)
    under the Bernoulli rule. Calibration-TS has another posterior for every token; there the
    round's one `Deviate` is met again by each of them.
    """

    def __init__(
        self,
        *,
        posterior: Posterior,
        stop: StopRule,
        redraw: Literal["token", "round"],
        belief: Belief,
        discount: float,
        rng: Random,
    ) -> None:
        self._posterior = posterior
        self._stop = stop
        self._redraw = redraw
        self._belief = belief
        self._discount = discount
        self._rng = rng
        self._chance = Deviate(rng)

    @property
    def needs_evidence(self) -> bool:
        return self._posterior.needs_evidence

    def begin_round(self) -> None:
        self._chance = Deviate(self._rng)
        self._stop.begin_round()

    def keep_drafting(self, evidence: Evidence) -> bool:
        if self._redraw == "token":
            self._chance = Deviate(self._rng)
        theta = self._posterior.theta(self._belief, evidence, self._chance)
        return self._stop.goes_on(theta)

    def observe(self, outcome: Outcome) -> None:
        self._belief = self._belief.after(outcome, discount=self._discount)
        self._stop.observe(outcome)

    def belief(self) -> Belief:
        return self._belief


class BetaPosterior:
    """Beta-TS: theta ~ Beta(alpha, beta), the same for every token."""

    @property
    def needs_evidence(self) -> bool:
        return False

    def theta(self, belief: Belief, evidence: Evidence, chance: Deviate) -> float:
        return chance.beta(belief.alpha, belief.beta)


class CalibratedBetaPosterior:
    """Calibration-TS, form (b): theta ~ Beta(kappa m + r, kappa (1 - m) + f).

    r and f are read off the belief's own (alpha, beta), so that kappa -> 0 is Beta-TS to the last
    digit; the uniform prior's one and one stay in, and keep both parameters positive.
    """

    def __init__(self, *, calibrator: Calibrator, strength: float) -> None:
        self._calibrator = calibrator
        self._strength = strength

    @property
    def needs_evidence(self) -> bool:
        return self._strength > 0.0

    def theta(self, belief: Belief, evidence: Evidence, chance: Deviate) -> float:
        if self._strength == 0.0:
            return chance.beta(belief.alpha, belief.beta)
        m = self._calibrator.probability(evidence)
        return chance.beta(
            self._strength * m + belief.alpha, self._strength * (1.0 - m) + belief.beta
        )


class CalibratedGaussianPosterior:
    """Calibration-TS, form (a): prior N(m, s0^2), and the counts a measurement of variance sn^2.

    sn^2 never falls below the floor. A tiny floor lets a first unlucky round (share 0, so variance
    0) end all drafting: simulated, 0.001 lost up to 44 % against the best fixed length.
    """

    def __init__(self, *, calibrator: Calibrator, prior_std: float, variance_floor: float) -> None:
        self._calibrator = calibrator
        self._prior_variance = prior_std**2
        self._floor = variance_floor

    @property
    def needs_evidence(self) -> bool:
        return True

    def theta(self, belief: Belief, evidence: Evidence, chance: Deviate) -> float:
        m = self._calibrator.probability(evidence)
        mean, variance = self._mixed(m, belief)
        return min(max(chance.normal(mean, math.sqrt(variance)), 0.0), 1.0)

    def _mixed(self, m: float, belief: Belief) -> tuple[float, float]:
        n = belief.num_tested
        if n <= 0.0:
            return m, self._prior_variance
        share = belief.num_accepted / n
        measured = max(share * (1.0 - share) / n, self._floor)
        variance = 1.0 / (1.0 / self._prior_variance + 1.0 / measured)
        return variance * (m / self._prior_variance + share / measured), variance


def make_controller(
    name: ControllerName,
    *,
    config: SpeculationConfig,
    belief: Belief,
    calibrator: Calibrator | None,
    rng: Random,
    cost: CostModel | None = None,
) -> Controller:
    """The controller of one request, warmed with `belief`.

    Without a fitted calibrator the exit head's own top-1 probability stands in for it; without a
    cost model `stop_rule: auto` is the Bernoulli rule, and `goodput` and `ucb` assume one.
    `goodput` made here decides for its request as if it were alone; `DraftPolicy` makes batches.
    """
    if name == "beta" or name == "calibration":
        return ThompsonController(
            posterior=_posterior(name, config, calibrator or Calibrator()),
            stop=_stop_rule(config, belief, cost, rng),
            redraw=config.redraw,
            belief=belief,
            discount=config.discount,
            rng=rng,
        )
    if name == "goodput":
        batch = Goodput(cost=cost, calibrator=calibrator, speculation=config)
        batch.admit(_ALONE, belief, rng)
        return GoodputController(batch=batch, request_id=_ALONE)
    return _unsampled(name, config, belief, cost or NOMINAL_COST)


def _unsampled(
    name: Literal["fixed", "threshold", "draft_verify", "ema", "ucb"],
    config: SpeculationConfig,
    belief: Belief,
    cost: CostModel,
) -> Controller:
    """The controllers that draw nothing."""
    ceiling, discount = config.max_draft_tokens, config.discount
    match name:
        case "fixed":
            return FixedController(length=config.fixed_length, belief=belief, discount=discount)
        case "threshold":
            return ThresholdController(eta=config.threshold, belief=belief, discount=discount)
        case "draft_verify":
            return DraftVerifyController(
                gamma=config.threshold,
                max_draft_tokens=ceiling,
                belief=belief,
                discount=discount,
            )
        case "ema":
            return EmaController(max_draft_tokens=ceiling, belief=belief, discount=discount)
        case "ucb":
            return UcbController(
                cost=cost, max_draft_tokens=ceiling, belief=belief, discount=discount
            )


def _posterior(
    name: Literal["beta", "calibration"], config: SpeculationConfig, calibrator: Calibrator
) -> Posterior:
    if name == "beta":
        return BetaPosterior()
    if config.calibration_form == "beta":
        return CalibratedBetaPosterior(calibrator=calibrator, strength=config.calibration_strength)
    return CalibratedGaussianPosterior(
        calibrator=calibrator,
        prior_std=config.calibration_prior_std,
        variance_floor=config.calibration_variance_floor,
    )


def _stop_rule(
    config: SpeculationConfig, belief: Belief, cost: CostModel | None, rng: Random
) -> StopRule:
    if config.stop_rule == "bernoulli" or (config.stop_rule == "auto" and cost is None):
        return BernoulliStop(rng=rng)
    if cost is None:
        raise ConfigError(
            f"speculation.stop_rule is {config.stop_rule} and no cost model was measured: "
            "run the start-up profile, or set stop_rule to auto or bernoulli"
        )
    if config.stop_rule == "steady":
        return SteadyStop(cost=cost, max_draft_tokens=config.max_draft_tokens, theta=belief.mean)
    return OptimalStop(cost=cost, max_draft_tokens=config.max_draft_tokens)
