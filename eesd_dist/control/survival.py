"""The chance that a drafted token and all before it are accepted, on a chain and on a tree.

A token survives when its parent does and it is the verifier's choice there. Of siblings at most
one is: the r-th alternative when the first choice and all alternatives before it are wrong, which
happens with a share that is learnt per rank. Refuses to know where the chance of a first choice
comes from.
"""

from typing import NamedTuple

from eesd_dist.types import Outcome

_PRIOR_HIT, _PRIOR_MISS = 1.0, 2.0
"""Before a rank was ever judged: a third of what the ranks before it missed."""


class Node(NamedTuple):
    """One drafted token's chance to survive."""

    drawn: float
    """By a draw of what may be."""
    expected: float
    """By the mean."""


ROOT = Node(1.0, 1.0)
"""The last known token."""


class Siblings:
    """The tokens that may follow one, in order of rank."""

    __slots__ = ("_drawn", "_expected", "_last", "_parent")

    def __init__(self, *, parent: Node, drawn: float, expected: float) -> None:
        """`drawn` and `expected`: that the first choice is right where its parent is."""
        self._parent = parent
        self._drawn = drawn
        self._expected = expected
        self._last: Node | None = None

    def next_node(self, share: float) -> Node:
        """The next rank's. `share`: how often it is right where all before it are wrong; of the
        first choice nothing is to be said.

        Never more than the rank before it has, so that siblings are drafted in order of rank.
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
    """How often each alternative was right where all before it were wrong: of all requests, with
    old verdicts forgotten."""

    def __init__(self, *, discount: float) -> None:
        self._discount = discount
        self._counts: list[tuple[float, float]] = []

    def of(self, rank: int) -> float:
        """The first choice (rank 0) has a chance of its own at every token; its share is 1."""
        if rank == 0:
            return 1.0
        hits, misses = self._counts[rank - 1] if rank <= len(self._counts) else (0.0, 0.0)
        return (_PRIOR_HIT + hits) / (_PRIOR_HIT + _PRIOR_MISS + hits + misses)

    def observe(self, outcome: Outcome) -> None:
        """Of each branch: ranks before the chosen one were wrong, those after it never judged."""
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
