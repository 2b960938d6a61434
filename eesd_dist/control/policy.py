"""All that an engine asks about drafting: one controller per request, and one answer per level.

The drafter works level by level: it offers the next tokens of every request at once and is told
which to draft. Refuses to know tokens, tensors, rounds in flight and where beliefs are kept; the
replaying benchmark asks it the same questions as the engine does.
"""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import TypeVar

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.goodput.controller import Goodput, GoodputController
from eesd_dist.control.offers import Offer
from eesd_dist.control.thompson import Controller, make_controller
from eesd_dist.control.tree_growth import TreeGrowth
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.types import ControllerName, Evidence, Outcome, RequestId

__all__ = ["DraftPolicy", "Offer"]


MaybeCalibrator = TypeVar("MaybeCalibrator", Calibrator, Calibrator | None)

_UNSEEN = Evidence(depth=0, top1_prob=1.0, top2_margin=1.0, entropy=0.0)


class DraftPolicy:
    """The controllers of an engine's live requests. One thread asks; advice may come from any."""

    def __init__(
        self,
        *,
        speculation: SpeculationConfig,
        cost: CostModel | None,
        calibrator: Calibrator | None,
    ) -> None:
        self._speculation = speculation
        self.cost = cost
        calibrator = self._calibrator = _for_the_rule(calibrator, speculation)
        self._controllers: dict[RequestId, Controller] = {}
        self._names: dict[RequestId, ControllerName] = {}
        self._advice: dict[RequestId, Belief] = {}
        self._batch = Goodput(cost=cost, calibrator=calibrator, speculation=speculation)
        """All requests under `goodput`, which are decided together."""
        self._growth = TreeGrowth(calibrator=calibrator, discount=speculation.discount)
        self._answers: dict[RequestId, bool] = {}
        """To questions of this level that could be answered before the exit head's guess."""

    def admit(self, request_id: RequestId, name: ControllerName | None, belief: Belief) -> None:
        """A request begins, warmed with `belief`; `name` None takes the service's default.

        Raises ConfigError when that controller lacks what it needs.
        """
        name = name or self._speculation.controller
        self._controllers[request_id] = self._make(request_id, name, belief)
        self._names[request_id] = name

    def check(self, name: ControllerName | None) -> None:
        """Raises RequestError where `admit` would fail with it."""
        name = name or self._speculation.controller
        if name == "goodput":
            return
        try:
            make_controller(
                name,
                config=self._speculation,
                belief=Belief(),
                calibrator=self._calibrator,
                rng=Random(),
                cost=self.cost,
            )
        except ConfigError as error:
            raise RequestError(str(error), param="speculation.controller") from error

    def advise(self, beliefs: Mapping[RequestId, Belief]) -> None:
        """The router's beliefs, from any thread: they count from each request's next round on."""
        if not self._speculation.learn:
            return
        known = self._controllers.keys() & beliefs.keys()
        self._advice.update({request_id: beliefs[request_id] for request_id in known})

    def recalibrate(self, calibrator: Calibrator) -> None:
        """Another exit head has come with a calibration of its own; beliefs stay what they are."""
        calibrator = self._calibrator = _for_the_rule(calibrator, self._speculation)
        self._batch.recalibrate(calibrator)
        self._growth.recalibrate(calibrator)
        for request_id, controller in list(self._controllers.items()):
            name = self._names[request_id]
            if name != "goodput":
                self._controllers[request_id] = self._make(request_id, name, controller.belief())

    def forget(self, request_id: RequestId) -> None:
        self._controllers.pop(request_id, None)
        self._names.pop(request_id, None)
        self._batch.forget(request_id)
        self._advice.pop(request_id, None)

    def live(self) -> tuple[RequestId, ...]:
        return tuple(self._controllers)

    def needs_evidence(self, request_ids: Iterable[RequestId]) -> bool:
        """False lets the drafter skip computing it; what it then offers is not looked at."""
        return any(self._controllers[request_id].needs_evidence for request_id in request_ids)

    def begin_round(
        self,
        request_ids: Iterable[RequestId],
        *,
        overlapped: bool = False,
        num_requests: int | None = None,
        num_known: int | None = None,
    ) -> None:
        """Before the first offers of a round, with everybody who may draft in it.

        `overlapped`: another cohort is verified meanwhile, so that the slower of drafting and
        verifying is what the round costs. `num_requests` and `num_known`: all requests of the round
        and their known rows, where there are more than one a drafting request.
        """
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._take_advice(request_id)
        self._answers = {}
        self._growth.begin_round()
        for request_id in self._alone(request_ids):
            self._controllers[request_id].begin_round()
        self._batch.begin_round(
            self._together(request_ids),
            overlapped=overlapped,
            num_requests=len(request_ids) if num_requests is None else num_requests,
            num_known=num_known,
        )

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> frozenset[RequestId]:
        """Whose next guess is worth the exit head's work; the others' drafts end here."""
        worth = self._batch.worth_a_guess(self._together(request_ids))
        return worth.union(i for i in self._alone(request_ids) if self._may_go_on(i))

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        """Which of one level's offers to draft. Who is refused is not offered again this round.

        Those with a controller of their own are decided first; `goodput` shares what is left.
        """
        alone = [offer for offer in offers if self._names[offer.request_id] != "goodput"]
        together = [offer for offer in offers if self._names[offer.request_id] == "goodput"]
        own = self._choose_alone(alone)
        own_taken, shared_taken = iter(own), iter(self._batch.choose(together, given=sum(own)))
        return [
            next(shared_taken if self._names[offer.request_id] == "goodput" else own_taken)
            for offer in offers
        ]

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Nothing is learnt where `speculation.learn` is off."""
        if not self._speculation.learn:
            return
        outcomes = list(outcomes)
        self._growth.observe(outcomes)
        for outcome in outcomes:
            controller = self._controllers.get(outcome.request_id)
            if controller is not None:
                controller.observe(outcome)

    def _may_go_on(self, request_id: RequestId) -> bool:
        """Who does not look at evidence has its answer before the guess; it is kept until the
        offer comes."""
        controller = self._controllers[request_id]
        if controller.needs_evidence:
            return True
        if request_id not in self._answers:
            self._answers[request_id] = controller.keep_drafting(_UNSEEN)
        return self._answers[request_id]

    def _choose_alone(self, offers: Sequence[Offer]) -> list[bool]:
        """Each controller has one answer a level, asked about the likeliest next token."""
        answers, self._answers = self._answers, {}
        for offer in offers:
            if offer.request_id not in answers:
                controller = self._controllers[offer.request_id]
                answers[offer.request_id] = controller.keep_drafting(offer.evidence)
        return self._growth.choose(offers, answers)

    def _alone(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        return [request_id for request_id in request_ids if self._names[request_id] != "goodput"]

    def _together(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        return [request_id for request_id in request_ids if self._names[request_id] == "goodput"]

    def _take_advice(self, request_id: RequestId) -> None:
        """Where the router knows more rounds than this engine's own, or where neither has seen one
        yet and the router has the better prior."""
        belief = self._advice.pop(request_id, None)
        mine = self._controllers[request_id].belief()
        if belief is None or 0 < mine.num_rounds >= belief.num_rounds:
            return
        self._controllers[request_id] = self._make(request_id, self._names[request_id], belief)

    def _make(self, request_id: RequestId, name: ControllerName, belief: Belief) -> Controller:
        rng = Random(f"{self._speculation.seed}/{request_id}")
        if name == "goodput":
            self._batch.admit(request_id, belief, rng)
            return GoodputController(batch=self._batch, request_id=request_id)
        return make_controller(
            name,
            config=self._speculation,
            belief=belief,
            calibrator=self._calibrator,
            rng=rng,
            cost=self.cost,
        )


def _for_the_rule(
    calibrator: MaybeCalibrator, speculation: SpeculationConfig
) -> MaybeCalibrator | Calibrator:
    """Calibrations are fitted on coupled rounds; rejection sampling accepts other tokens and draws
    without a score gap, so its forecasts are the exit head's own."""
    return Calibrator() if speculation.acceptance == "rejection" else calibrator
