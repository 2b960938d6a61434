"""Protocols of draft-length controllers, and what controllers are built from.

A `Controller` decides for one request: it is asked before every draft token whether to draft it,
and is told after every round how the verifier judged the draft. A `BatchController` decides for all
of its requests in a round, level by level. Both depend on counts, seconds of the cost model and the
exit head's evidence, never on tensors, clocks or texts; equal seeds give equal decisions. Decisions
affect speed only: every token is the verifier's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import ChainReport, ChainRule
from eesd_dist.control.cost import NOMINAL_COST, CostModel
from eesd_dist.control.tree_growth import Offer, TreeGrowth
from eesd_dist.types import Evidence, Outcome, RequestId, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSetup:
    """Inputs that the controllers of one engine are built from."""

    speculation: SpeculationConfig
    cost: CostModel | None
    """Measured cost; None if nothing was measured."""
    calibrator: Calibrator
    trees: TreeGrowth
    """Shared by controllers that decide the depth of a draft and not its tokens."""

    @property
    def assumed_cost(self) -> CostModel:
        """The measured cost, or `NOMINAL_COST`; for controllers that need a cost model."""
        return self.cost or NOMINAL_COST

    def rng(self, request_id: RequestId) -> Random:
        """Returns a request's random generator, independent of the engine's other requests."""
        return Random(f"{self.speculation.seed}/{request_id}")


class Controller(Protocol):
    """Decides for one request how far to draft."""

    @property
    def needs_evidence(self) -> bool:
        """False lets the drafter skip a guess that will not be drafted; the evidence it then passes
        is ignored."""
        ...

    @property
    def needs_probs(self) -> bool:
        """True if it reads `Evidence.top1_prob`, for which the drafter passes over the logits."""
        ...

    def begin_round(self) -> None:
        """Called before the first `keep_drafting` of every round."""
        ...

    def keep_drafting(self, evidence: Evidence) -> bool:
        """Returns whether to draft the token with this evidence."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns from the verdict of one round."""
        ...


@runtime_checkable
class RuleController(Controller, Protocol):
    """A controller that reads evidence and may state its decisions on a round in advance."""

    @property
    def has_rule(self) -> bool:
        """True if `chain_rule` may be asked in every round."""
        ...

    def chain_rule(self, temperature: float) -> ChainRule:
        """Returns its decisions on this round.
        `temperature`: of the request's choices, 0 if they are greedy."""
        ...


class RoundLoad(Value, frozen=True, kw_only=True):
    """Load of a round that is about to be drafted."""

    request_ids: tuple[RequestId, ...]
    """The controller's requests that may draft in it."""
    num_requests: int
    """All requests of the round, including those without drafts or with another controller."""
    num_known: int
    """Known rows of the round: one per request, more for a prefill chunk."""
    num_prefill: int = 0
    """Part of them that no token is sampled after: rows of prompts. They are computed in any case,
    so that their time is not a price of drafts."""
    overlapped: bool
    """True if another microbatch is verified at the same time: the round then takes the longer of
    drafting and verifying, not both."""

    @property
    def num_decoding(self) -> int:
        """Requests that get a token in this round."""
        return self.num_known - self.num_prefill


class DraftRound(Protocol):
    """Decisions of one round: level by level, all requests together, or in advance as rules."""

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> Set[RequestId]:
        """Returns the requests with a next guess worth the exit head's time; other drafts end."""
        ...

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        """Returns which of one level's offers to draft. A request without any is not offered again.
        Called on every level of the round, also without offers."""
        ...

    def lookup_length(self, request_id: RequestId, find: Callable[[], tuple[int, int]]) -> int:
        """Returns how many tokens found by prompt lookup to draft for a request; 0: the exit head
        drafts. Called before the first level. `find` looks for them: it returns how many tokens
        agree before the earlier occurrence and how many follow it, zeros if there is none."""
        ...

    def has_rules(self, request_ids: Iterable[RequestId]) -> bool:
        """Returns whether decisions on these requests can be made in advance."""
        ...

    def chain_rules(self, temperatures: Mapping[RequestId, float]) -> Mapping[RequestId, ChainRule]:
        """Returns the decisions on the chains of these requests as numbers, where `has_rules`. A
        drafter that uses them asks neither of the first two, and reports once. `temperatures`: of
        each choice, 0 if it is greedy."""
        ...

    def report(self, reports: Mapping[RequestId, ChainReport]) -> None:
        """Takes what was drafted by the rules."""
        ...


class BatchController(Protocol):
    """Decides over all of its requests in a round."""

    @property
    def needs_probs(self) -> bool:
        """Same as `Controller.needs_probs`."""
        ...

    @property
    def weighs_costs(self) -> bool:
        """True if it drafts what pays, so that it leaves out a round to learn what drafts cost."""
        ...

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        """Adds a request, or replaces its belief by one from more rounds."""
        ...

    def end(self, request_id: RequestId) -> None:
        """Removes a request. A verdict of its last round may still be observed."""
        ...

    def awake(self, request_ids: Sequence[RequestId]) -> Sequence[RequestId]:
        """Returns which of its requests in the round that begins may draft; the others rest, and
        have no verdict. Called once in each round that may have drafts."""
        ...

    def begin_round(self, load: RoundLoad) -> DraftRound: ...

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Learns from verdicts of (part of) a round, including other controllers' requests."""
        ...

    def take_cost(self, cost: CostModel) -> None:
        """Decides by these costs from the next round on."""
        ...

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None:
        """Switches to another exit head. `beliefs`: those of all its requests, unchanged."""
        ...
