"""All that an engine asks about drafting: one controller per request, and one answer per level.

The drafter works level by level: it offers the next tokens of every request at once and is told
which to draft. Refuses to know tokens, tensors, rounds in flight and where beliefs are kept; the
replaying benchmark asks it the same questions as the engine does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.controllers import Controller, make_controller
from eesd_dist.control.cost import CostModel
from eesd_dist.types import ControllerName, Evidence, Outcome, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A token that could be drafted next for one request."""

    request_id: RequestId
    evidence: Evidence
    """Of the distribution it was drawn from; `depth` counts the drafted tokens before it."""
    parent: int = -1
    """Which drafted token of this request it follows, counted in the order they were taken; -1
    follows the last known token."""
    rank: int = 0
    """0: the exit head's first choice after its parent; r: its r-th alternative."""


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
        self._cost = cost
        self._calibrator = calibrator
        self._controllers: dict[RequestId, Controller] = {}
        self._names: dict[RequestId, ControllerName] = {}
        self._advice: dict[RequestId, Belief] = {}

    def admit(self, request_id: RequestId, name: ControllerName | None, belief: Belief) -> None:
        """A request begins, warmed with `belief`; `name` None takes the service's default.

        Raises ConfigError when that controller lacks what it needs.
        """
        name = name or self._speculation.controller
        self._controllers[request_id] = self._make(request_id, name, belief)
        self._names[request_id] = name

    def advise(self, beliefs: Mapping[RequestId, Belief]) -> None:
        """The router's beliefs, from any thread: they count from each request's next round on."""
        known = self._controllers.keys() & beliefs.keys()
        self._advice.update({request_id: beliefs[request_id] for request_id in known})

    def recalibrate(self, calibrator: Calibrator) -> None:
        """Another exit head has come with a calibration of its own; beliefs stay what they are."""
        self._calibrator = calibrator
        for request_id, controller in list(self._controllers.items()):
            name = self._names[request_id]
            self._controllers[request_id] = self._make(request_id, name, controller.belief())

    def forget(self, request_id: RequestId) -> None:
        self._controllers.pop(request_id, None)
        self._names.pop(request_id, None)
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
        for request_id in request_ids:
            self._take_advice(request_id)
            self._controllers[request_id].begin_round()

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> frozenset[RequestId]:
        """Whose next guess is worth the exit head's work; the others' drafts end here."""
        return frozenset(request_ids)

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        """Which of one level's offers to draft. Who is refused is not offered again this round."""
        return [
            self._controllers[offer.request_id].keep_drafting(offer.evidence) for offer in offers
        ]

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            controller = self._controllers.get(outcome.request_id)
            if controller is not None:
                controller.observe(outcome)

    def _take_advice(self, request_id: RequestId) -> None:
        """Where the router knows more rounds than this engine's own, or where neither has seen one
        yet and the router has the better prior."""
        belief = self._advice.pop(request_id, None)
        mine = self._controllers[request_id].belief()
        if belief is None or 0 < mine.num_rounds >= belief.num_rounds:
            return
        self._controllers[request_id] = self._make(request_id, self._names[request_id], belief)

    def _make(self, request_id: RequestId, name: ControllerName, belief: Belief) -> Controller:
        return make_controller(
            name,
            config=self._speculation,
            belief=belief,
            calibrator=self._calibrator,
            rng=Random(f"{self._speculation.seed}/{request_id}"),
            cost=self._cost,
        )
