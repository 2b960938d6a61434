"""Adapts controllers of single requests to a controller of a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from random import Random

from eesd_dist.control.base import Controller, ControlSetup, RoundLoad, RuleController
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import ChainReport, ChainRule, of_length
from eesd_dist.control.cost import CostModel
from eesd_dist.control.tree_growth import Offer, TreeGrowth
from eesd_dist.types import Evidence, Outcome, RequestId

ControllerBuilder = Callable[[ControlSetup, Belief, Random], Controller]
"""Builds the controller of one request with an initial belief."""

_NOT_COMPUTED = Evidence(depth=0)


class OneByOne:
    """Batch controller with one controller per request."""

    weighs_costs = False

    def __init__(self, build: ControllerBuilder, setup: ControlSetup) -> None:
        """Raises ConfigError if `setup` lacks something the controller needs."""
        self._build = build
        self._setup = setup
        self._controllers: dict[RequestId, Controller] = {}
        self._by_rule: dict[RequestId, RuleController] = {}
        """The controllers with a rule."""
        self.needs_probs = build(setup, Belief(), Random()).needs_probs

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        rng = self._setup.rng(request_id)
        controller = self._build(self._setup, belief, rng)
        self._controllers[request_id] = controller
        self._by_rule.pop(request_id, None)
        if isinstance(controller, RuleController) and controller.has_rule:
            self._by_rule[request_id] = controller

    def end(self, request_id: RequestId) -> None:
        self._controllers.pop(request_id, None)
        self._by_rule.pop(request_id, None)

    def awake(self, request_ids: Sequence[RequestId]) -> Sequence[RequestId]:
        return request_ids

    def begin_round(self, load: RoundLoad) -> "_Round":
        controllers = {i: self._controllers[i] for i in load.request_ids}
        for controller in controllers.values():
            controller.begin_round()
        longest = self._setup.speculation.max_draft_tokens
        return _Round(controllers, self._by_rule, self._setup.trees, longest=longest)

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            controller = self._controllers.get(outcome.request_id)
            if controller is not None:
                controller.observe(outcome)

    def take_cost(self, cost: CostModel) -> None:
        """Sets the costs for requests admitted from now on."""
        self._setup = replace(self._setup, cost=cost)

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None:
        self._setup = replace(self._setup, calibrator=calibrator)
        for request_id, belief in beliefs.items():
            self.admit(request_id, belief)


class _Round:
    """Asks each controller once per level, about the likeliest next token."""

    def __init__(
        self,
        controllers: Mapping[RequestId, Controller],
        by_rule: Mapping[RequestId, RuleController],
        trees: TreeGrowth,
        *,
        longest: int,
    ) -> None:
        self._controllers = controllers
        self._by_rule = by_rule
        self._max_length = longest
        self._trees = trees
        self._answers: dict[RequestId, bool] = {}
        """Answers of this level that needed no evidence."""

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> Set[RequestId]:
        return {request_id for request_id in request_ids if self._may_go_on(request_id)}

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        answers, self._answers = self._answers, {}
        for offer in offers:
            if offer.request_id not in answers:
                controller = self._controllers[offer.request_id]
                answers[offer.request_id] = controller.keep_drafting(offer.evidence)
        return self._trees.choose(offers, answers)

    def lookup_length(self, request_id: RequestId, find: Callable[[], tuple[int, int]]) -> int:
        return 0

    def has_rules(self, request_ids: Iterable[RequestId]) -> bool:
        return all(
            request_id in self._by_rule or not self._controllers[request_id].needs_evidence
            for request_id in request_ids
        )

    def chain_rules(self, temperatures: Mapping[RequestId, float]) -> Mapping[RequestId, ChainRule]:
        return {
            request_id: self._rule(request_id, temperature)
            for request_id, temperature in temperatures.items()
        }

    def report(self, reports: Mapping[RequestId, ChainReport]) -> None:
        """Does nothing: such a controller learns from verdicts."""

    def _rule(self, request_id: RequestId, temperature: float) -> ChainRule:
        """Returns a controller's rule, or its length if it needs no evidence."""
        controller = self._by_rule.get(request_id)
        if controller is not None:
            return controller.chain_rule(temperature)
        return of_length(self._length(self._controllers[request_id]))

    def _length(self, controller: Controller) -> int:
        length = 0
        while length < self._max_length and controller.keep_drafting(_NOT_COMPUTED):
            length += 1
        return length

    def _may_go_on(self, request_id: RequestId) -> bool:
        controller = self._controllers[request_id]
        if controller.needs_evidence:
            return True
        if request_id not in self._answers:
            self._answers[request_id] = controller.keep_drafting(_NOT_COMPUTED)
        return self._answers[request_id]
