"""What a draft-length controller is: two protocols, and what both are given.

A `Controller` decides for one request. It is asked before every draft token whether one more is
worth drawing, and is told after every round how the verifier judged the draft. A `BatchController`
decides for all of its requests in a round, level by level. Both see counts, seconds of the cost
model and the exit head's evidence, never tensors, clocks or texts; equal seeds give equal
decisions. A decision changes time alone: every token is the verifier's.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Protocol

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import NOMINAL_COST, CostModel
from eesd_dist.control.offers import Offer
from eesd_dist.control.tree_growth import TreeGrowth
from eesd_dist.types import Evidence, Outcome, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSetup:
    """What controllers of one engine are built from; each takes what it needs."""

    speculation: SpeculationConfig
    cost: CostModel | None
    """Measured; None where nothing was."""
    calibrator: Calibrator
    trees: TreeGrowth
    """Shared by the controllers that say how deep a draft goes and not which tokens it has."""

    @property
    def assumed_cost(self) -> CostModel:
        """For controllers that decide nothing without costs."""
        return self.cost or NOMINAL_COST

    def rng(self, request_id: RequestId) -> Random:
        """A request's own draws: the same ones whatever else the engine serves."""
        return Random(f"{self.speculation.seed}/{request_id}")


class Controller(Protocol):
    """Decides for one request how far to draft."""

    @property
    def needs_evidence(self) -> bool:
        """False lets the drafter skip computing it; what it then passes is not looked at."""
        ...

    def begin_round(self) -> None:
        """Before the first question of every round."""
        ...

    def keep_drafting(self, evidence: Evidence) -> bool:
        """Whether to draft the token this evidence is about."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """The verdict of one round."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLoad:
    """A round that is about to be drafted."""

    request_ids: tuple[RequestId, ...]
    """The controller's own requests that may draft in it."""
    num_requests: int
    """All requests of the round, also those that draft nothing or have another controller."""
    num_known: int
    """Known rows of the round: one a request, more for a prefill chunk."""
    overlapped: bool
    """Another microbatch is verified meanwhile: the round costs the slower of drafting and
    verifying, not both."""


class DraftRound(Protocol):
    """The decisions of one round. Drafts grow level by level, all requests together."""

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> Set[RequestId]:
        """The requests whose next guess is worth the exit head's work; the other drafts end."""
        ...

    def choose(self, offers: Sequence[Offer], *, given: int) -> list[bool]:
        """Which of one level's offers to draft. A request that is refused is not offered again.

        Called on every level of the round, with no offers too. `given`: tokens that other
        controllers draft on this level.
        """
        ...


class BatchController(Protocol):
    """Decides over all of its requests in a round."""

    @property
    def needs_evidence(self) -> bool:
        """As a `Controller`'s."""
        ...

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        """A request begins, or begins again with a belief that rests on more rounds."""
        ...

    def end(self, request_id: RequestId) -> None:
        """The request is over. A verdict of its last round may still be observed."""
        ...

    def begin_round(self, load: RoundLoad) -> DraftRound: ...

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Verdicts of a round or of a part of it, other controllers' requests included."""
        ...

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None:
        """Another exit head has come. `beliefs`: of all its requests; they stay what they are."""
        ...
