"""The `goodput` controller: decides the drafts of all its requests in one engine together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from eesd_dist.control.base import ControlSetup, RoundLoad
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.goodput.costs import CostTable
from eesd_dist.control.goodput.estimates import Exploration, PromiseRatio
from eesd_dist.control.goodput.forecast import Forecast, RequestForecast
from eesd_dist.control.goodput.lookup import RequestSources, Sources
from eesd_dist.control.goodput.round import Draft, GoodputRound, RoundSetup
from eesd_dist.types import Outcome, RequestId

_PATIENCE, _LONGEST_REST = 4, 4
"""Rounds without a draft before a request rests, and the longest rest, as a power of two."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    rng: Random
    forecast: RequestForecast
    sources: RequestSources = field(default_factory=RequestSources)
    round: GoodputRound | None = None
    """The round of its next verdict."""
    num_idle: int = 0
    """Latest rounds of its own without a draft."""
    pause: int = 0
    """Rounds that it is still left out of."""


class Goodput:
    """Batch-wide controller that maximizes tokens per second of the whole batch."""

    def __init__(self, setup: ControlSetup) -> None:
        self._setup = setup
        self._forecast = Forecast(calibrator=setup.calibrator, learns=setup.speculation.learn)
        self._rounds = RoundSetup(
            costs=CostTable(setup.assumed_cost),
            forecast=self._forecast,
            exploration=Exploration(),
            sources=Sources(),
            max_draft_tokens=setup.speculation.max_draft_tokens,
        )
        self._promises = PromiseRatio()
        self._requests: dict[RequestId, _Request] = {}
        self._num_rested = 0
        """Rounds of requests that have rested since the last round."""

    @property
    def needs_probs(self) -> bool:
        return self._forecast.needs_probs

    @property
    def weighs_costs(self) -> bool:
        return True

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        self._requests[request_id] = _Request(
            rng=self._setup.rng(request_id),
            forecast=self._forecast.new_request(belief),
        )

    def end(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def take_cost(self, cost: CostModel) -> None:
        self._rounds = replace(self._rounds, costs=CostTable(cost))

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None:
        requests = list(self._requests.values())  # other threads may be admitting
        self._forecast.recalibrate(calibrator, [request.forecast for request in requests])

    def rests(self, request_id: RequestId) -> bool:
        request = self._requests[request_id]
        if not request.pause:
            return False
        request.pause -= 1
        self._num_rested += 1
        return True

    def begin_round(self, load: RoundLoad) -> GoodputRound:
        requests = {request_id: self._requests[request_id] for request_id in load.request_ids}
        self._forecast.begin_round([request.forecast for request in requests.values()])
        drafts = {
            request_id: Draft(
                request=request.forecast,
                chance=request.rng.gauss(0.0, 1.0),
                sources=request.sources,
                rng=request.rng,
            )
            for request_id, request in requests.items()
        }
        round_ = GoodputRound(
            self._rounds,
            load,
            drafts,
            promise_ratio=self._promises.value,
            num_rested=self._num_rested,
        )
        self._num_rested = 0
        for request in requests.values():
            request.round = round_
        return round_

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is None:
                continue
            round_, request.round = request.round, None
            if round_ is None:  # it rested
                continue
            request.num_idle = 0 if outcome.num_drafted else request.num_idle + 1
            request.pause = _rest_after(request.num_idle)
            if outcome.num_drafted:
                scores = round_.scores_of(outcome.request_id)
                self._forecast.observe(request.forecast, outcome, scores)
            if outcome.is_lookup:
                self._rounds.sources.observe_lookup(request.sources, outcome)
            else:
                self._rounds.sources.observe_head(request.sources, round_.head_gain(outcome))
            self._promises.observe(
                came=round_.yielded(outcome.num_accepted),
                promised=round_.promised,
                share=round_.share,
            )


def _rest_after(num_idle: int) -> int:
    """Returns how many rounds a request rests after so many without a draft: deciding takes time
    too."""
    if num_idle < _PATIENCE:
        return 0
    return 1 << min(num_idle - _PATIENCE, _LONGEST_REST)
