"""Drafting the chains of a round in one call: what it is told, and what it returns.

`engine.compiled` does it on a CPU, `engine.cuda` on a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from eesd_dist.control.chain_rule import ChainReport, ChainRule
from eesd_dist.engine.row_slices import RowSlice
from eesd_dist.model.attention.rows import RowSegment


# Shapes: T known rows, D hidden channels.
class ChainStart(NamedTuple):
    """A request of a round: its known rows, and how to draft after them."""

    tokens: Sequence[int]
    """Tokens of the known rows."""
    segment: RowSegment
    """The known rows."""
    max_draft: int
    """Tokens to draft at most; 0: the exit head does not run, and the rest has no meaning."""
    rule: ChainRule
    lagging: Sequence[RowSlice] = ()
    """The head's inputs of the rows before the known ones that it has not read yet."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    mask: bytes = b""
    """The tokens that may be guessed; empty: any. Only where one guess is made at most."""


class DraftedChain(NamedTuple):
    """Results of one request."""

    rows_TD: RowSlice
    """The known rows, and one of each drafted token."""
    tokens: list[int]
    """The drafted tokens; after them the guess that ended the draft, if one did; -1 for a guess of
    which the mask leaves none."""
    gaps: list[float]
    """Score gap of each of them."""
    report: ChainReport


class ChainDrafter(Protocol):
    """Layers [0, N) and the exit head of one rank. One call at a time."""

    name: str
    """Name in the statistics of rounds."""
    has_masks: bool
    """True if guesses may have a mask."""

    def draft(self, chains: Sequence[ChainStart]) -> tuple[Tensor, list[DraftedChain]]:
        """Runs all known rows, and drafts after them. Returns the rows [T, D] after the layers,
        request by request, and each request's results."""
        ...
