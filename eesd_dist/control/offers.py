"""A token that could be drafted next: the question a drafter asks.

The drafter works level by level and offers the next tokens of every request at once. Holds no
opinion on them.
"""

from dataclasses import dataclass

from eesd_dist.types import Evidence, RequestId, TreeShape


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
    """0: the exit head's first choice after its parent; r: its r-th alternative. There is room for
    all that are offered; those taken are numbered in the order they were offered."""
    shape: TreeShape = "none"
    """What its request's drafts look like."""
