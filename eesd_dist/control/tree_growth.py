"""Chooses a level's tokens for requests with controllers that decide alone.

A drafter that works level by level offers the next tokens of all requests.

The controller decides whether its request's draft goes one level deeper. A chain then gets its one
next token and a static tree all offered tokens; a dynamic tree gets those with a survival above a
floor, by the calibrated probability of first choices and the learnt share of alternatives (the
trees of EAGLE-2, arXiv 2406.16858, grow by the same product of confidences; here they are
calibrated first). Does not depend on costs: `goodput` weighs tokens against seconds instead.
"""

from collections.abc import Iterable, Mapping, Sequence

from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.survival import ROOT, Node, RankShares, Siblings
from eesd_dist.types import Evidence, Outcome, RequestId, TreeShape, Value


class Offer(Value, frozen=True, kw_only=True):
    """A token that could be drafted next for one request."""

    request_id: RequestId
    evidence: Evidence
    """Evidence of its distribution; `depth` counts the drafted tokens before it."""
    parent: int = -1
    """Index of the drafted token of this request that it follows, in the order they were taken; -1:
    the last known token."""
    rank: int = 0
    """0: the exit head's first choice after its parent; r: its r-th alternative. There is room for
    all offers; those taken are numbered in the order they were offered."""
    shape: TreeShape = "none"
    """Shape of its request's drafts."""


FLOOR = 0.12
"""Minimum survival: tokens that survive in fewer than an eighth of rounds rarely pay for a row."""


class TreeGrowth:
    """Trees of one round so far."""

    def __init__(
        self, *, calibrator: Calibrator | None, discount: float, floor: float = FLOOR
    ) -> None:
        self._calibrator = calibrator or Calibrator()
        self._shares = RankShares(discount=discount)
        self._floor = floor
        self._nodes: dict[RequestId, list[Node]] = {}

    def recalibrate(self, calibrator: Calibrator) -> None:
        self._calibrator = calibrator

    def begin_round(self) -> None:
        self._nodes = {}

    def choose(self, offers: Sequence[Offer], goes_on: Mapping[RequestId, bool]) -> list[bool]:
        """Returns one decision per offer; siblings are offered in order of rank."""
        siblings: dict[tuple[RequestId, int], Siblings] = {}
        return [
            goes_on[offer.request_id]
            and (offer.shape != "dynamic" or self._is_likely(offer, siblings))
            for offer in offers
        ]

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._shares.observe(outcome)

    def _is_likely(self, offer: Offer, siblings: dict[tuple[RequestId, int], Siblings]) -> bool:
        nodes = self._nodes.setdefault(offer.request_id, [])
        family = siblings.get((offer.request_id, offer.parent))
        if family is None:
            m = self._calibrator.probability(offer.evidence)
            parent = ROOT if offer.parent < 0 else nodes[offer.parent]
            family = Siblings(parent=parent, drawn=m, expected=m)
            siblings[offer.request_id, offer.parent] = family
        node = family.next_node(self._shares.of(offer.rank))
        if node.expected < self._floor:
            return False
        nodes.append(node)
        return True
