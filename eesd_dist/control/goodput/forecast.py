"""Forecasts the probability that an offered token is accepted.

    theta = sigmoid(logit m + pool + own + z * std)      z ~ N(0, 1), once per request and round

m is the calibrated probability of the token; `pool` and `own` are the drifts (`drift`) of all
requests and of this one: Calibration-TS with its mixing done in log-odds. On recorded rounds of the
bundled model this forecasts better (log-loss 0.504) than its beta form at any strength (0.508 at
best), since a request's counts add little to the evidence.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator, judged_tokens, logit
from eesd_dist.control.chain_rule import LogOdds
from eesd_dist.control.goodput.estimates import Drift, RunningMean, sigmoid
from eesd_dist.control.survival import Node, RankShares, Siblings
from eesd_dist.types import Evidence, Outcome

_POOL_STD, _POOL_MEMORY = 1.0, 0.995
_OWN_STD, _OWN_MEMORY = 0.3, 0.98
_MEAN_START = 0.7
_MEAN_MEMORY, _POOL_MEAN_MEMORY = 0.95, 0.995
"""Discounts per guess of the running means of a request and of all requests."""
_PRIOR_GUESSES = 4.0
_MOST_TEMPERATURES = 64
"""Maximum number of temperatures of which the calibration is kept."""


def _own_drift() -> Drift:
    return Drift(std=_OWN_STD, memory=_OWN_MEMORY)


def _pool_drift() -> Drift:
    return Drift(std=_POOL_STD, memory=_POOL_MEMORY)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestForecast:
    """Forecast state of one request."""

    running_mean: RunningMean
    drift: Drift = field(default_factory=_own_drift)


class Forecast:
    """Forecast state of all requests together; forecasts tokens from it and a request's state."""

    def __init__(self, *, calibrator: Calibrator, learns: bool) -> None:
        self._calibrator = calibrator
        self._odds: dict[float, LogOdds] = {}
        """The calibration, by temperature."""
        self._learns = learns
        self._drift = _pool_drift()
        self._ranks = RankShares(discount=_POOL_MEMORY)
        self._running_mean = RunningMean(
            mean=_MEAN_START, weight=_PRIOR_GUESSES, memory=_POOL_MEAN_MEMORY
        )

    @property
    def needs_probs(self) -> bool:
        return self._calibrator.needs_probs

    @property
    def spread(self) -> float:
        """Standard deviation of the guesses' probabilities, over all requests."""
        return self._running_mean.std

    def new_request(self, belief: Belief) -> RequestForecast:
        """Returns the state of a new request: the mean of all requests and its belief, weighted."""
        weight = belief.weight + _PRIOR_GUESSES
        mean = (_PRIOR_GUESSES * self._running_mean.mean + belief.weight * belief.mean) / weight
        return RequestForecast(
            running_mean=RunningMean(mean=mean, weight=weight, memory=_MEAN_MEMORY)
        )

    def recalibrate(self, calibrator: Calibrator, requests: Iterable[RequestForecast]) -> None:
        """Switches to another exit head, and resets all drifts, which were the old head's."""
        self._calibrator, self._odds = calibrator, {}
        self._drift = _pool_drift()
        for request in requests:
            request.drift = _own_drift()

    def begin_round(self, requests: Iterable[RequestForecast]) -> None:
        if self._learns:
            self._drift.forget_a_little()
            for request in requests:
                request.drift.forget_a_little()

    def siblings(
        self, request: RequestForecast, evidence: Evidence, *, parent: Node, chance: float
    ) -> Siblings:
        """Returns the survival of tokens that may follow `parent`; `chance`: z of the round."""
        score = logit(self._calibrator.probability(evidence)) + self._drift.mean
        mean = sigmoid(score + request.drift.mean)
        std = math.sqrt(request.drift.variance + self._drift.variance)
        drawn = sigmoid(score + request.drift.mean + chance * std)
        self.see(request, mean)
        return Siblings(parent=parent, drawn=drawn, expected=mean)

    def see(self, request: RequestForecast, mean: float) -> None:
        """Adds a guess's forecast to the running means."""
        if self._learns:
            request.running_mean.see(mean)
            self._running_mean.see(mean)

    def at(self, request: RequestForecast, temperature: float) -> tuple[LogOdds, float, float]:
        """Returns the calibration at a temperature, and mean and standard deviation of what this
        request's guesses add to it in log-odds."""
        odds = self._odds.get(temperature)
        if odds is None:
            if len(self._odds) >= _MOST_TEMPERATURES:
                self._odds.clear()
            odds = self._odds[temperature] = self._calibrator.at_temperature(temperature)
        std = math.sqrt(request.drift.variance + self._drift.variance)
        return odds, self._drift.mean + request.drift.mean, std

    def share_of(self, rank: int) -> float:
        """Returns how often the alternative of this rank is right if all before it are wrong."""
        return self._ranks.of(rank)

    def observe(
        self, request: RequestForecast, outcome: Outcome, scores: Sequence[float] = ()
    ) -> None:
        """Learns from a verdict. `scores`: the calibrated log-odds of each guess, if the chain rule
        made them."""
        if scores:
            num_judged = min(outcome.num_accepted + 1, outcome.num_drafted)
            for depth, score in enumerate(scores[:num_judged]):
                self._learn(request, score, depth < outcome.num_accepted)
            return
        for evidence, accepted in judged_tokens([outcome]):
            self._learn(request, logit(self._calibrator.probability(evidence)), accepted)
        self._ranks.observe(outcome)

    def _learn(self, request: RequestForecast, score: float, accepted: bool) -> None:
        """Updates both drifts with one judged token; `score`: its calibrated log-odds."""
        pool = self._drift.mean
        self._drift.observe(score + request.drift.mean, accepted=accepted)
        request.drift.observe(score + pool, accepted=accepted)
