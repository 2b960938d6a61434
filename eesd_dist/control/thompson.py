"""Thompson sampling of the acceptance rate: Beta-TS and Calibration-TS (arXiv 2406.03853).

    beta         theta ~ Beta(alpha, beta)
    calibration  theta from the calibrated probability of the token, mixed with the request's
                 counts

A posterior samples theta; a stop rule (`stopping`) decides the length from it.
"""

from random import Random
from typing import Literal, Protocol

import numpy as np

from eesd_dist.control.base import Controller, ControlSetup
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import ChainRule, Doubles, LogOdds, acceptance, of_length
from eesd_dist.control.draws import Deviate
from eesd_dist.control.stopping import BernoulliStop, OptimalStop, StopRule
from eesd_dist.errors import ConfigError
from eesd_dist.types import Evidence, Outcome

FORECASTS = (0.001, *(0.05 * step for step in range(1, 20)), 0.999)
"""Points of the curve of theta where the calibration has none."""


def beta(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    return _thompson(BetaPosterior(), setup, belief, rng)


def calibration(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    posterior = CalibratedPosterior(
        calibrator=setup.calibrator, strength=setup.speculation.calibration_strength
    )
    return _thompson(posterior, setup, belief, rng)


class Posterior(Protocol):
    """Distribution of the next token's acceptance probability, given belief and evidence."""

    @property
    def needs_evidence(self) -> bool: ...
    @property
    def needs_probs(self) -> bool: ...
    def theta(self, belief: Belief, evidence: Evidence, chance: Deviate) -> float: ...
    def curve(self, belief: Belief, chance: Deviate) -> Doubles | None:
        """Returns theta by the sigmoid of a guess's log-odds, as `LogOdds.curve`; None if theta
        depends on something else."""
        ...


class ThompsonController:
    """Samples the acceptance probability and applies the stop rule to the sample.

    `redraw: token` draws a new `Deviate` for every token. `redraw: round` draws one per round:
    Beta-TS then has one theta for the round, so that P(continue k times) =
    prod_{i<k} (alpha+i)/(alpha+beta+i) under the Bernoulli rule. Calibration-TS has another
    posterior for every token, and all of them use the round's `Deviate`: theta is then a curve over
    the calibrated probability, with which the optimal rule is a `ChainRule`.
    """

    def __init__(
        self,
        *,
        posterior: Posterior,
        stop: StopRule,
        redraw: Literal["token", "round"],
        belief: Belief,
        calibrator: Calibrator,
        discount: float,
        rng: Random,
    ) -> None:
        self._posterior = posterior
        self._stop = stop
        self._redraw = redraw
        self._belief = belief
        self._calibrator = calibrator
        self._discount = discount
        self._rng = rng
        self._chance = Deviate(rng)
        self._curve: Doubles | None = None
        self.has_rule = (
            redraw == "round" and isinstance(stop, OptimalStop) and not posterior.needs_probs
        )
        """True if `chain_rule` may be asked in every round."""

    @property
    def needs_evidence(self) -> bool:
        return self._posterior.needs_evidence and self._stop.wants_guess()

    @property
    def needs_probs(self) -> bool:
        return self._posterior.needs_probs

    def begin_round(self) -> None:
        self._chance = Deviate(self._rng)
        belief = self._belief
        expected = self._chance.beta(belief.alpha, belief.beta)
        self._stop.begin_round(expected, 1.0 if self._posterior.needs_evidence else expected)
        self._curve = self._posterior.curve(belief, self._chance) if self.has_rule else None

    def keep_drafting(self, evidence: Evidence) -> bool:
        if not self._stop.wants_guess():
            return False
        if self._redraw == "token":
            self._chance = Deviate(self._rng)
        if self._curve is None:
            theta = self._posterior.theta(self._belief, evidence, self._chance)
        else:
            rule = of_length(0)._replace(odds=self._odds(evidence.temperature))
            theta, _ = acceptance(rule, evidence.depth, evidence.gap)
        return self._stop.goes_on(theta)

    def chain_rule(self, temperature: float) -> ChainRule:
        """Returns its decisions on this round, where it `has_rule`."""
        assert isinstance(self._stop, OptimalStop)
        if self._curve is None:
            return of_length(self._stop.best_length)
        return self._stop.rule._replace(odds=self._odds(temperature))

    def observe(self, outcome: Outcome) -> None:
        self._belief = self._belief.after(outcome, discount=self._discount)

    def _odds(self, temperature: float) -> LogOdds:
        assert self._curve is not None
        return self._calibrator.at_temperature(temperature)._replace(curve=self._curve)


class BetaPosterior:
    """Beta-TS: theta ~ Beta(alpha, beta), the same for every token."""

    needs_evidence = needs_probs = False

    def theta(self, belief: Belief, evidence: Evidence, chance: Deviate) -> float:
        return chance.beta(belief.alpha, belief.beta)

    def curve(self, belief: Belief, chance: Deviate) -> Doubles | None:
        return None


class CalibratedPosterior:
    """Calibration-TS: theta ~ Beta(kappa m + r, kappa (1 - m) + f).

    r and f are the belief's (alpha, beta), so that kappa -> 0 equals Beta-TS exactly; they include
    the uniform prior, which keeps both parameters positive.
    """

    def __init__(self, *, calibrator: Calibrator, strength: float) -> None:
        self._calibrator = calibrator
        self._strength = strength
        forecasts = [forecast for forecast, _ in calibrator.curve] or FORECASTS
        self._forecasts = np.array(forecasts)
        self._probabilities = np.array([calibrator.straightened(x) for x in forecasts])

    @property
    def needs_evidence(self) -> bool:
        return self._strength > 0.0

    @property
    def needs_probs(self) -> bool:
        return self.needs_evidence and self._calibrator.needs_probs

    def theta(self, belief: Belief, evidence: Evidence, chance: Deviate) -> float:
        if self._strength == 0.0:
            return chance.beta(belief.alpha, belief.beta)
        m = self._calibrator.probability(evidence)
        return chance.beta(
            self._strength * m + belief.alpha, self._strength * (1.0 - m) + belief.beta
        )

    def curve(self, belief: Belief, chance: Deviate) -> Doubles | None:
        """Returns theta at the points of the calibration's curve: between them both are nearly
        linear."""
        if self._strength == 0.0:
            return None
        m = self._probabilities
        thetas = chance.betas(
            self._strength * m + belief.alpha, self._strength * (1.0 - m) + belief.beta
        )
        return np.stack([self._forecasts, thetas], axis=1)


def _thompson(
    posterior: Posterior, setup: ControlSetup, belief: Belief, rng: Random
) -> ThompsonController:
    return ThompsonController(
        posterior=posterior,
        stop=_stop_rule(setup, rng),
        redraw=setup.speculation.redraw,
        belief=belief,
        calibrator=setup.calibrator,
        discount=setup.speculation.discount,
        rng=rng,
    )


def _stop_rule(setup: ControlSetup, rng: Random) -> StopRule:
    """Returns the configured rule; without a cost model `auto` is the Bernoulli rule."""
    config, cost = setup.speculation, setup.cost
    if config.stop_rule == "bernoulli" or (config.stop_rule == "auto" and cost is None):
        return BernoulliStop(rng=rng)
    if cost is None:
        raise ConfigError(
            f"speculation.stop_rule is {config.stop_rule} and no cost model was measured: "
            "run the start-up profile, or set stop_rule to auto or bernoulli"
        )
    return OptimalStop(cost=cost, max_draft_tokens=config.max_draft_tokens)
