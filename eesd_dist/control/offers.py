"""Offers: tokens that could be drafted next.

A drafter that works level by level offers the next tokens of all requests to the controllers.
"""

from eesd_dist.types import Evidence, RequestId, TreeShape, Value


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
