"""The `goodput` controller: decides the drafts of all its requests in one engine together."""

from collections.abc import Iterable, Mapping, Sequence
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
_IN_VAIN = 32
"""Rounds since a token was accepted after which new requests begin with a rest."""
_MOST_TABLES = 4


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    rng: Random
    forecast: RequestForecast
    sources: RequestSources = field(default_factory=RequestSources)
    round: GoodputRound | None = None
    """The round of its next verdict."""
    num_idle: int = 0
    """Latest rounds of its own without a draft, or with a lookup in vain."""
    wakes_at: int = 0
    """Round in which its rest ends."""


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
        self._round = 0
        """Number of the round."""
        self._num_in_vain = 0
        """Rounds with decisions since one in which a drafted token was accepted."""
        self._tables: dict[int, CostTable] = {}
        """Tables of the latest cost models, by identity."""

    @property
    def needs_probs(self) -> bool:
        return self._forecast.needs_probs

    @property
    def weighs_costs(self) -> bool:
        return True

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        num_idle = _PATIENCE + _LONGEST_REST if self._is_in_vain else 0
        self._requests[request_id] = _Request(
            rng=self._setup.rng(request_id),
            forecast=self._forecast.new_request(belief),
            num_idle=num_idle,
            wakes_at=self._wake_after(num_idle),
        )

    def end(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def take_cost(self, cost: CostModel) -> None:
        table = self._tables.pop(id(cost), None) or CostTable(cost)
        if len(self._tables) >= _MOST_TABLES:
            self._tables.pop(next(iter(self._tables)))
        self._tables[id(cost)] = table
        self._rounds = replace(self._rounds, costs=table)

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None:
        requests = list(self._requests.values())  # other threads may be admitting
        self._forecast.recalibrate(calibrator, [request.forecast for request in requests])

    def awake(self, request_ids: Sequence[RequestId]) -> Sequence[RequestId]:
        self._round += 1
        active_ids = [i for i in request_ids if self._requests[i].wakes_at <= self._round]
        self._num_rested += len(request_ids) - len(active_ids)
        return active_ids

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
        outcomes = [outcome for outcome in outcomes if outcome.request_id in self._requests]
        if outcomes:
            is_in_vain = not any(outcome.num_accepted for outcome in outcomes)
            self._num_in_vain = self._num_in_vain + 1 if is_in_vain else 0
        for outcome in outcomes:
            request = self._requests[outcome.request_id]
            round_, request.round = request.round, None
            if round_ is None:  # it could not draft, or was admitted again since
                continue
            # Lookups cost little, so that many are tried: those in vain do not keep it awake. Nor
            # does a draft to find out, where all have been in vain.
            needs_success = outcome.is_lookup or self._is_in_vain
            is_idle = not (outcome.num_accepted if needs_success else outcome.num_drafted)
            request.num_idle = request.num_idle + 1 if is_idle else 0
            request.wakes_at = self._wake_after(request.num_idle)
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

    @property
    def _is_in_vain(self) -> bool:
        return self._num_in_vain >= _IN_VAIN

    def _wake_after(self, num_idle: int) -> int:
        """Returns the round in which to decide again after so many without a draft: deciding takes
        time too. Requests wake in the same rounds, so that most rounds have nothing to decide."""
        if num_idle < _PATIENCE:
            return 0
        pause = 1 << min(num_idle - _PATIENCE, _LONGEST_REST)
        return (self._round // pause + 1) * pause
