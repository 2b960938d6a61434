"""The engine's interface to draft-length control.

The drafter asks for the controllers' decisions in advance, as rules; where they or it cannot, it
works level by level: it offers the next tokens of all requests, and the policy decides which to
draft, with the controller that each request names. Does not depend on tokens, tensors,
rounds in flight or where beliefs are pooled. The replay benchmark uses it in the same way as the
engine.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.base import BatchController, ControlSetup, DraftRound, RoundLoad
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import ChainReport, ChainRule
from eesd_dist.control.cost import CostModel
from eesd_dist.control.learnt_cost import LearntCost, RoundCost
from eesd_dist.control.registry import entry_of
from eesd_dist.control.tree_growth import Offer, TreeGrowth
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.types import Outcome, RequestId


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    group: BatchController
    belief: Belief
    advice: deque[Belief] = field(default_factory=lambda: deque(maxlen=1))
    """The router's latest belief, used from the next round on. Appended to by another thread."""


class DraftPolicy:
    """Draft decisions for the live requests of an engine, grouped by controller.

    Decisions are made in one thread; `admit` and `advise` may be called from any thread.
    """

    def __init__(
        self,
        *,
        speculation: SpeculationConfig,
        cost: CostModel | None,
        calibrator: Calibrator | None,
    ) -> None:
        """Raises ConfigError if the default controller does not exist."""
        entry_of(speculation.controller)
        calibrator = _for_acceptance(calibrator or Calibrator(), speculation)
        trees = TreeGrowth(calibrator=calibrator, discount=speculation.discount)
        self._setup = ControlSetup(
            speculation=speculation, cost=cost, calibrator=calibrator, trees=trees
        )
        self._learnt = LearntCost(cost) if cost is not None else None
        self._learns_cost = (
            speculation.learn and speculation.learn_costs and speculation.cost_file is None
        )
        self._groups: dict[str, BatchController] = {}
        """Built when a request first names them, and kept with their state. Replaced and never
        mutated, since another thread may be iterating."""
        self._requests: dict[RequestId, _Request] = {}
        self._rounds: list[tuple[BatchController, DraftRound]] = []
        """Groups with requests in this round."""
        self._active: Set[RequestId] = frozenset()
        """Requests that may draft in this round."""

    @property
    def profile(self) -> CostModel | None:
        """The costs as they were before the first round."""
        return None if self._learnt is None else self._learnt.profile

    @property
    def cost(self) -> CostModel | None:
        """The costs that decide now: the start-up profile, for the size and context of the latest
        round, corrected by the rounds since."""
        return self._setup.cost

    def observe_cost(self, cost: RoundCost) -> None:
        """Learns from a finished round without prefill and lookups, unless that is switched off."""
        if self._learnt is not None and self._learns_cost:
            self._learnt.observe(cost)

    def admit(self, request_id: RequestId, name: str | None, belief: Belief) -> None:
        """Adds a request with an initial belief; `name` None is the service's default controller.

        Raises ConfigError if the controller does not exist, or lacks something it needs.
        """
        group = self._group(name)
        group.admit(request_id, belief)
        self._requests[request_id] = _Request(group=group, belief=belief)

    def check(self, name: str | None) -> None:
        """Raises RequestError if `admit` would fail with this controller."""
        try:
            self._group(name)
        except ConfigError as error:
            raise RequestError(str(error), param="speculation.controller") from error

    def advise(self, beliefs: Mapping[RequestId, Belief]) -> None:
        """Takes the router's beliefs, from any thread; used from each request's next round on."""
        if not self._setup.speculation.learn:
            return
        for request_id, belief in beliefs.items():
            request = self._requests.get(request_id)
            if request is not None:
                request.advice.append(belief)

    def recalibrate(self, calibrator: Calibrator) -> None:
        """Switches to the calibration of another exit head; beliefs do not change."""
        calibrator = _for_acceptance(calibrator, self._setup.speculation)
        self._setup = replace(self._setup, calibrator=calibrator)
        self._setup.trees.recalibrate(calibrator)
        requests = list(self._requests.items())  # other threads may be admitting
        for group in self._groups.values():
            beliefs = {name: request.belief for name, request in requests if request.group is group}
            group.recalibrate(calibrator, beliefs)

    def end(self, request_id: RequestId) -> None:
        """Drops all state of a request."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.group.end(request_id)

    def live(self) -> tuple[RequestId, ...]:
        return tuple(self._requests)

    def needs_probs(self, request_ids: Iterable[RequestId]) -> bool:
        """Returns whether a controller of these requests reads `Evidence.top1_prob`."""
        return any(self._requests[request_id].group.needs_probs for request_id in request_ids)

    def begin_round(
        self,
        request_ids: Iterable[RequestId],
        *,
        overlapped: bool = False,
        num_requests: int | None = None,
        num_known: int | None = None,
        num_prefill: int = 0,
        context: int | None = None,
    ) -> Set[RequestId]:
        """Starts a round, before its first offers, with all requests that may draft in it. Returns
        those that do not rest: the others draft nothing, and need not be asked for.

        `overlapped`: another microbatch is verified at the same time, so that the round takes the
        longer of drafting and verifying. `num_requests` and `num_known`: all requests of the round
        and their known rows, if there are more than one per drafting request; `num_prefill`: those
        of prompts, after which no token is sampled. `context`: the mean number of their stored
        positions; None: as in the round before.
        """
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._take_advice(request_id)
        count = len(request_ids) if num_requests is None else num_requests
        self._take_cost(count, context)
        is_plain = self._learnt is not None and self._learnt.wants_plain
        self._rounds = []
        self._setup.trees.begin_round()
        num_rows = max(count, num_known or 0)
        active: set[RequestId] = set()
        for group in self._groups.values():
            if is_plain and group.weighs_costs:
                continue
            group_ids = [i for i in request_ids if self._requests[i].group is group]
            active_ids = group.awake(group_ids) if group_ids else ()
            if active_ids:
                active.update(active_ids)
                load = RoundLoad(
                    request_ids=tuple(active_ids),
                    num_requests=count,
                    num_known=num_rows,
                    num_prefill=num_prefill,
                    overlapped=overlapped,
                )
                self._rounds.append((group, group.begin_round(load)))
        self._active = active
        return active

    def lookup_length(self, request_id: RequestId, find: Callable[[], tuple[int, int]]) -> int:
        """Returns how many tokens found by prompt lookup to draft for a request of this round; 0:
        the exit head drafts. Called before anything else is asked in a round; `find`: as of
        `DraftRound.lookup_length`."""
        if not self._setup.speculation.prompt_lookup or request_id not in self._active:
            return 0
        group = self._requests[request_id].group
        (round_,) = (round_ for owner, round_ in self._rounds if owner is group)
        return round_.lookup_length(request_id, find)

    def chain_rules(self, temperatures: Mapping[RequestId, float]) -> Mapping[RequestId, ChainRule]:
        """Returns the decisions on the chains of these requests of the round in advance, as far as
        their controllers can make them. A drafter that uses them calls `report` once, and asks
        nothing else about these requests in this round. `temperatures`: of each request's choices,
        0 if they are greedy."""
        rules: dict[RequestId, ChainRule] = {}
        for group, round_ in self._rounds:
            group_temperatures = {
                i: temperature
                for i, temperature in temperatures.items()
                if self._requests[i].group is group and round_.has_rules((i,))
            }
            if group_temperatures:
                rules.update(round_.chain_rules(group_temperatures))
        return rules

    def report(self, reports: Mapping[RequestId, ChainReport]) -> None:
        """Takes what was drafted by the chain rules."""
        for group, round_ in self._rounds:
            group_reports = {
                request_id: report
                for request_id, report in reports.items()
                if self._requests[request_id].group is group
            }
            if group_reports:
                round_.report(group_reports)

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> Set[RequestId]:
        """Returns requests with a next guess worth the exit head's time; the other drafts end."""
        worth: set[RequestId] = set()
        for group, round_ in self._rounds:
            group_ids = [
                i for i in request_ids if self._requests[i].group is group and i in self._active
            ]
            worth |= round_.worth_a_guess(group_ids)
        return worth

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        """Returns which of one level's offers to draft. A request without any is not offered
        again."""
        choices = [False] * len(offers)
        for group, round_ in self._rounds:
            positions = [
                at
                for at, offer in enumerate(offers)
                if self._requests[offer.request_id].group is group
            ]
            chosen = round_.choose([offers[at] for at in positions])
            for at, is_chosen in zip(positions, chosen, strict=True):
                choices[at] = is_chosen
        return choices

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Learns from verdicts, unless `speculation.learn` is off."""
        speculation = self._setup.speculation
        if not speculation.learn:
            return
        outcomes = list(outcomes)
        self._setup.trees.observe(outcomes)
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is not None:
                request.belief = request.belief.after(outcome, discount=speculation.discount)
        for group in self._groups.values():
            group.observe(outcomes)

    def _take_cost(self, num_requests: int, context: int | None) -> None:
        """Decides by the costs of such a round from now on."""
        if self._learnt is None:
            return
        cost = self._learnt.select(num_requests, context)
        if cost is not self._setup.cost:
            self._setup = replace(self._setup, cost=cost)
            for group in self._groups.values():
                group.take_cost(cost)

    def _take_advice(self, request_id: RequestId) -> None:
        """Takes over the router's belief if it is from more rounds than the engine's, or if the
        engine has seen none yet: the router then has the better prior."""
        request = self._requests[request_id]
        if not request.advice:
            return
        advice = request.advice.pop()
        if 0 < request.belief.num_rounds >= advice.num_rounds:
            return
        request.belief = advice
        request.group.admit(request_id, advice)

    def _group(self, name: str | None) -> BatchController:
        """Raises ConfigError if the controller does not exist, or lacks something it needs."""
        name = name or self._setup.speculation.controller
        if name not in self._groups:
            group = entry_of(name).build(self._setup)
            self._groups = {**self._groups, name: group}
        return self._groups[name]


def _for_acceptance(calibrator: Calibrator, speculation: SpeculationConfig) -> Calibrator:
    """Returns the default calibrator for rejection sampling, which accepts other tokens and has no
    score gap: calibrations are fitted on coupled rounds."""
    return Calibrator() if speculation.acceptance == "rejection" else calibrator
