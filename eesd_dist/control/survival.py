"""Survival: the probability that a drafted token and all before it are accepted.

A token survives if its parent does and it is the verifier's choice there. Of siblings at most one
is: the r-th alternative only if the first choice and all alternatives before it are wrong; how
often it is then right is learnt per rank. Does not depend on how a first choice's probability is
computed.
"""

from typing import NamedTuple

from eesd_dist.types import Outcome

_PRIOR_HIT, _PRIOR_MISS = 1.0, 2.0
"""Prior counts: a rank is right in a third of the cases that the ranks before it missed."""


class Node(NamedTuple):
    """Survival of one drafted token."""

    drawn: float
    """Survival by a Thompson draw."""
    expected: float
    """Survival by the mean."""


ROOT = Node(1.0, 1.0)
"""The last known token."""


class Siblings:
    """Possible successors of one token, in order of rank."""

    __slots__ = ("_drawn", "_expected", "_last", "_parent")

    def __init__(self, *, parent: Node, drawn: float, expected: float) -> None:
        """`drawn` and `expected`: P(first choice is right | its parent is)."""
        self._parent = parent
        self._drawn = drawn
        self._expected = expected
        self._last: Node | None = None

    def next_node(self, share: float) -> Node:
        """Returns the next rank's node. `share`: how often it is right if all before it are wrong;
        unused for the first choice.

        Its survival is at most that of the rank before, so that siblings are drafted in order.
        """
        parent, last = self._parent, self._last
        if last is None:
            node = Node(parent.drawn * self._drawn, parent.expected * self._expected)
            self._drawn, self._expected = 1.0 - self._drawn, 1.0 - self._expected
        else:
            node = Node(
                min(parent.drawn * self._drawn * share, last.drawn),
                min(parent.expected * self._expected * share, last.expected),
            )
            self._drawn *= 1.0 - share
            self._expected *= 1.0 - share
        self._last = node
        return node


class RankShares:
    """Share of verdicts in which each alternative was right if all before it were wrong: over all
    requests, with older verdicts discounted."""

    def __init__(self, *, discount: float) -> None:
        self._discount = discount
        self._counts: list[tuple[float, float]] = []

    def of(self, rank: int) -> float:
        """Returns a rank's share; 1 for the first choice (rank 0), which has a probability."""
        if rank == 0:
            return 1.0
        hits, misses = self._counts[rank - 1] if rank <= len(self._counts) else (0.0, 0.0)
        return (_PRIOR_HIT + hits) / (_PRIOR_HIT + _PRIOR_MISS + hits + misses)

    def observe(self, outcome: Outcome) -> None:
        """Counts every branch: ranks before the chosen one were wrong, later ones not judged."""
        for branch in outcome.branches:
            chosen = branch.chosen_rank
            last = branch.num_offered - 1 if chosen < 0 else min(chosen, branch.num_offered - 1)
            for rank in range(1, last + 1):
                self._count(rank, is_hit=rank == chosen)

    def _count(self, rank: int, *, is_hit: bool) -> None:
        while len(self._counts) < rank:
            self._counts.append((0.0, 0.0))
        hits, misses = self._counts[rank - 1]
        keep = self._discount
        self._counts[rank - 1] = (keep * hits + is_hit, keep * misses + (not is_hit))
