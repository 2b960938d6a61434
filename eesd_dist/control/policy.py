"""All that an engine asks about drafting: one record per request, and one answer per level.

The drafter works level by level: it offers the next tokens of every request at once and is told
which to draft. Routes each request to the controller it names; knows no tokens, tensors or rounds
in flight, and not where beliefs are pooled. The replaying benchmark asks it the same questions as
the engine does.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.base import BatchController, ControlSetup, DraftRound, RoundLoad
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.offers import Offer
from eesd_dist.control.registry import BatchWide, entry_of
from eesd_dist.control.tree_growth import TreeGrowth
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.types import Outcome, RequestId


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    group: BatchController
    belief: Belief
    advice: deque[Belief] = field(default_factory=lambda: deque(maxlen=1))
    """The router's latest, which counts from the next round on. Another thread appends to it."""


class DraftPolicy:
    """The live requests of an engine, grouped by controller.

    One thread asks; requests and advice may come from any.
    """

    def __init__(
        self,
        *,
        speculation: SpeculationConfig,
        cost: CostModel | None,
        calibrator: Calibrator | None,
    ) -> None:
        """Raises ConfigError when the default controller is not known."""
        entry_of(speculation.controller)
        calibrator = _for_acceptance(calibrator or Calibrator(), speculation)
        trees = TreeGrowth(calibrator=calibrator, discount=speculation.discount)
        self._setup = ControlSetup(
            speculation=speculation, cost=cost, calibrator=calibrator, trees=trees
        )
        self._groups: dict[str, BatchController] = {}
        """Built when a request first names them, and kept with what they have learnt. Replaced and
        never changed, since another thread may be going through them."""
        self._requests: dict[RequestId, _Request] = {}
        self._rounds: list[tuple[BatchController, DraftRound]] = []
        """Of the groups with requests in this round, in the order they decide in."""

    @property
    def cost(self) -> CostModel | None:
        return self._setup.cost

    def admit(self, request_id: RequestId, name: str | None, belief: Belief) -> None:
        """A request begins, warmed with `belief`; `name` None takes the service's default.

        Raises ConfigError when there is no such controller, or when it lacks what it needs.
        """
        group = self._group(name)
        group.admit(request_id, belief)
        self._requests[request_id] = _Request(group=group, belief=belief)

    def check(self, name: str | None) -> None:
        """Raises RequestError where `admit` would fail with it."""
        try:
            self._group(name)
        except ConfigError as error:
            raise RequestError(str(error), param="speculation.controller") from error

    def advise(self, beliefs: Mapping[RequestId, Belief]) -> None:
        """The router's beliefs, from any thread: they count from each request's next round on."""
        if not self._setup.speculation.learn:
            return
        for request_id, belief in beliefs.items():
            request = self._requests.get(request_id)
            if request is not None:
                request.advice.append(belief)

    def recalibrate(self, calibrator: Calibrator) -> None:
        """Another exit head has come with a calibration of its own; beliefs stay what they are."""
        calibrator = _for_acceptance(calibrator, self._setup.speculation)
        self._setup = replace(self._setup, calibrator=calibrator)
        self._setup.trees.recalibrate(calibrator)
        requests = list(self._requests.items())  # others may be admitting
        for group in self._groups.values():
            beliefs = {name: request.belief for name, request in requests if request.group is group}
            group.recalibrate(calibrator, beliefs)

    def end(self, request_id: RequestId) -> None:
        """Drops all that is kept of a request."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.group.end(request_id)

    def live(self) -> tuple[RequestId, ...]:
        return tuple(self._requests)

    def needs_evidence(self, request_ids: Iterable[RequestId]) -> bool:
        """False lets the drafter skip computing it; what it then offers is not looked at."""
        return any(self._requests[request_id].group.needs_evidence for request_id in request_ids)

    def begin_round(
        self,
        request_ids: Iterable[RequestId],
        *,
        overlapped: bool = False,
        num_requests: int | None = None,
        num_known: int | None = None,
    ) -> None:
        """Before the first offers of a round, with all requests that may draft in it.

        `overlapped`: another microbatch is verified meanwhile, so that the slower of drafting and
        verifying is what the round costs. `num_requests` and `num_known`: all requests of the round
        and their known rows, where there are more than one a drafting request.
        """
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._take_advice(request_id)
        self._setup.trees.begin_round()
        count = len(request_ids) if num_requests is None else num_requests
        known = max(count, num_known or 0)
        self._rounds = []
        for group in self._groups.values():
            mine = tuple(i for i in request_ids if self._requests[i].group is group)
            if mine:
                load = RoundLoad(
                    request_ids=mine, num_requests=count, num_known=known, overlapped=overlapped
                )
                self._rounds.append((group, group.begin_round(load)))

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> Set[RequestId]:
        """Requests whose next guess is worth the exit head's work; the others' drafts end here."""
        worth: set[RequestId] = set()
        for group, round_ in self._rounds:
            mine = [i for i in request_ids if self._requests[i].group is group]
            worth |= round_.worth_a_guess(mine)
        return worth

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        """Which of one level's offers to draft. A request that is refused is not offered again.

        Controllers of single requests decide first; batch-wide ones share what is left.
        """
        taken = [False] * len(offers)
        for group, round_ in self._rounds:
            mine = [
                at
                for at, offer in enumerate(offers)
                if self._requests[offer.request_id].group is group
            ]
            chosen = round_.choose([offers[at] for at in mine], given=sum(taken))
            for at, is_taken in zip(mine, chosen, strict=True):
                taken[at] = is_taken
        return taken

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Nothing is learnt where `speculation.learn` is off."""
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

    def _take_advice(self, request_id: RequestId) -> None:
        """Where the router knows more rounds than this engine's own, or where neither has seen one
        yet and the router has the better prior."""
        request = self._requests[request_id]
        if not request.advice:
            return
        advice = request.advice.pop()
        if 0 < request.belief.num_rounds >= advice.num_rounds:
            return
        request.belief = advice
        request.group.admit(request_id, advice)

    def _group(self, name: str | None) -> BatchController:
        """Raises ConfigError when there is no such controller, or when it lacks what it needs."""
        name = name or self._setup.speculation.controller
        if name not in self._groups:
            group = entry_of(name).build(self._setup)
            groups = {**self._groups, name: group}
            self._groups = dict(sorted(groups.items(), key=_decides_last))
        return self._groups[name]


def _decides_last(named: tuple[str, BatchController]) -> bool:
    return isinstance(entry_of(named[0]), BatchWide)


def _for_acceptance(calibrator: Calibrator, speculation: SpeculationConfig) -> Calibrator:
    """Calibrations are fitted on coupled rounds; rejection sampling accepts other tokens and draws
    without a score gap, so its forecasts are the exit head's own."""
    return Calibrator() if speculation.acceptance == "rejection" else calibrator
