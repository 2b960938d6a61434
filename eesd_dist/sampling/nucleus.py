"""top_p: the smallest set of largest scores with a given mass (Holtzman et al. 2019, arXiv
1904.09751).

The set is taken of what top_k left. Its last score is its edge; of the tokens with this score the
smallest ids belong to the nucleus. Masses are integers, so that the edge does not depend on the
order of a sum or on how rows are divided among ranks.

Shapes: R rows, U rows with a tail, W of them of which the whole mass is needed, V columns of this
rank's shard, G ranks, C largest scores of one rank or of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.sampling.backend import sampling_on
from eesd_dist.sampling.best_scores import BestScores, is_wide
from eesd_dist.sampling.elementary import mass_of
from eesd_dist.sampling.score_search import search
from eesd_dist.sampling.sharded_rows import ShardedRows, column, replace, rows_where, select

_EVERYTHING = 2.0
"""A top_p that keeps all tokens, including those with a mass that rounds to 0."""


@dataclass(frozen=True, slots=True)
class Nucleus:
    """The lowest score that top_p keeps in each row, and what it keeps of equal scores."""

    score_R1: Tensor
    """The lowest score of all, or -inf, where everything is kept."""
    has_excess_R1: Tensor
    """True where more tokens have this score than belong to the nucleus."""
    _best: BestScores
    _num_best_R1: Tensor
    """Size of the nucleus where its edge is above the cutoff of the largest scores."""
    _tail: "_TailEdge | None"

    @classmethod
    def of(cls, rows: ShardedRows, kth_R1: Tensor | None, best: BestScores) -> "Nucleus":
        """`kth_R1` are the lowest scores that top_k left."""
        masses = _BestMasses.of(best, kth_R1)
        top_p = [
            rule.params.top_p if rule.params.top_p < 1.0 else _EVERYTHING for rule in rows.rules
        ]
        top_p_R1 = column(top_p, like=rows.scores_RV, dtype=torch.float64)
        tail = _Tail.of(rows, kth_R1, best, masses)
        total_R1 = masses.seen
        if tail is not None:
            total_R1 = replace(total_R1, tail.at, tail.total_U1)
        target_R1 = (top_p_R1 * total_R1.double()).ceil_().long().clamp_min_(1)
        last = best.ranked_RC.shape[-1] - 1
        num_before_R1 = torch.searchsorted(masses.sum_RC, target_R1)
        score_R1 = best.ranked_RC.gather(-1, num_before_R1.clamp_max(last))
        num_best_R1 = num_before_R1 + 1
        next_R1 = best.ranked_RC.gather(-1, num_best_R1.clamp_max(last))
        has_excess_R1 = (next_R1 == score_R1) & (num_best_R1 <= last)
        if best.is_complete:
            return cls(score_R1, has_excess_R1, best, num_best_R1, None)
        edge = None
        if tail is not None:
            edge = tail.edge(target_R1)
            score_R1 = edge.merged(score_R1, edge.score_U1)
            has_excess_R1 = edge.merged(has_excess_R1, edge.has_excess)
        score_R1 = score_R1.masked_fill(target_R1 > total_R1, -torch.inf)
        has_excess_R1 = has_excess_R1 & (target_R1 <= total_R1)
        return cls(score_R1, has_excess_R1, best, num_best_R1, edge)

    def room(self, rank: int) -> Tensor:
        """Returns the number [R, 1] of tokens at the edge that are kept of this rank's, which
        may be negative, where `has_excess_R1`."""
        num_above_R1 = (self._best.ranked_RC > self.score_R1).sum(dim=-1, keepdim=True)
        is_equal_GRC = self._best.by_rank_GRC[:rank] == self.score_R1
        before_R1 = is_equal_GRC.sum(dim=-1, keepdim=True).sum(dim=0)
        room_R1 = self._num_best_R1 - num_above_R1 - before_R1
        if self._tail is None:
            return room_R1
        return self._tail.merged(room_R1, self._tail.room(rank))


@dataclass(frozen=True, slots=True)
class _BestMasses:
    """Masses of the largest scores, relative to the peak of the row."""

    peak_R1: Tensor
    sum_RC: Tensor
    """Running sum of what top_k left above the cutoff."""
    cutoff_R1: Tensor
    """Mass of one token with the score of the cutoff."""

    @classmethod
    def of(cls, best: BestScores, kth_R1: Tensor | None) -> "_BestMasses":
        # a finite peak: a row without a possible token has a mass of 0
        peak_R1 = best.ranked_RC[:, :1].clamp_min(torch.finfo(torch.float32).min)
        scores_RC = best.ranked_RC
        if not best.is_complete:
            scores_RC = torch.cat([scores_RC, best.cutoff_R1], dim=-1)
        mass_RC = mass_of(scores_RC - peak_R1)
        cutoff_R1 = mass_RC[:, -1:]
        if not best.is_complete:
            mass_RC = mass_RC[:, :-1].masked_fill(best.ranked_RC <= best.cutoff_R1, 0)
        if kth_R1 is not None:
            mass_RC.masked_fill_(best.ranked_RC < kth_R1, 0)
        return cls(peak_R1, mass_RC.cumsum(dim=-1), cutoff_R1)

    @property
    def seen(self) -> Tensor:
        return self.sum_RC[:, -1:]


@dataclass(frozen=True, slots=True)
class _TailEdge:
    """Edges at or below the cutoff of the largest scores."""

    rows: Sequence[int]
    has_edge_U1: Tensor
    """Which of these rows have such an edge."""
    score_U1: Tensor
    num_included_U1: Tensor
    """Number of tokens at the edge that are kept, of all ranks."""
    ties_GU1: Tensor
    """Number of tokens at the edge that each rank has."""

    @property
    def has_excess(self) -> Tensor:
        return self.ties_GU1.sum(dim=0) > self.num_included_U1

    def room(self, rank: int) -> Tensor:
        return self.num_included_U1 - self.ties_GU1[:rank].sum(dim=0)

    def merged(self, x_R1: Tensor, edge_U1: Tensor) -> Tensor:
        """Returns x with `edge_U1` in the rows that have their edge here."""
        x_U1 = select(x_R1, self.rows)
        return replace(x_R1, self.rows, torch.where(self.has_edge_U1, edge_U1, x_U1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """Tokens that top_k left at and below the cutoff of the largest scores, in the rows where it
    did."""

    at: Sequence[int]
    """Indices of these rows among all."""
    rows: ShardedRows
    peak_U1: Tensor
    cutoff_U1: Tensor
    cutoff_mass_U1: Tensor
    """Mass of one token at the cutoff."""
    seen_U1: Tensor
    """Mass above the cutoff."""
    ties_GU1: Tensor
    """Number of tokens of each rank at the cutoff."""
    reached_U1: Tensor
    """Mass down to the cutoff, with all tokens there."""
    total_U1: Tensor
    """Mass of what top_k left."""
    wide: Sequence[int]
    """Which of these rows may reach below the cutoff."""
    mass_WV: Tensor | None

    @classmethod
    def of(
        cls, rows: ShardedRows, kth_R1: Tensor | None, best: BestScores, masses: _BestMasses
    ) -> "_Tail | None":
        """Exchanges two integers a row; returns None where no row has a tail."""
        at = _rows_with_a_tail(rows, kth_R1, best)
        if not at:
            return None
        tail_rows = rows.select(at)
        peak_U1, cutoff_U1 = select(masses.peak_R1, at), select(best.cutoff_R1, at)
        ties_U1 = (tail_rows.scores_RV == cutoff_U1).sum(dim=-1, keepdim=True)
        mass_U1 = torch.zeros_like(ties_U1)
        wide = [row for row, rule in enumerate(tail_rows.rules) if is_wide(rule)]
        mass_WV = None
        if wide:
            kth_W1 = None if kth_R1 is None else select(select(kth_R1, at), wide)
            mass_WV = _masses(tail_rows.select(wide).scores_RV, select(peak_U1, wide), kth_W1)
            mass_U1 = replace(mass_U1, wide, mass_WV.sum(dim=-1, keepdim=True))
        gathered_GU2 = tail_rows.gathered(torch.cat([ties_U1, mass_U1], dim=-1))
        ties_GU1, mass_GU1 = gathered_GU2.tensor_split(2, dim=-1)
        cutoff_mass_U1, seen_U1 = select(masses.cutoff_R1, at), select(masses.seen, at)
        # top_k ends at the cutoff in rows that are not wide
        reached_U1 = total_U1 = seen_U1 + ties_GU1.sum(dim=0) * cutoff_mass_U1
        if wide:
            total_U1 = replace(total_U1, wide, select(mass_GU1.sum(dim=0), wide))
        return cls(
            at=at,
            rows=tail_rows,
            peak_U1=peak_U1,
            cutoff_U1=cutoff_U1,
            cutoff_mass_U1=cutoff_mass_U1,
            seen_U1=seen_U1,
            ties_GU1=ties_GU1,
            reached_U1=reached_U1,
            total_U1=total_U1,
            wide=wide,
            mass_WV=mass_WV,
        )

    def edge(self, target_R1: Tensor) -> _TailEdge:
        """Returns edges at the cutoff, and searches those that are below it."""
        target_U1 = select(target_R1, self.at)
        has_edge_U1 = target_U1 > self.seen_U1
        ends_below: list[int] = []
        if self.wide:
            reaches_U1 = (target_U1 > self.reached_U1) & (target_U1 <= self.total_U1)
            ends_below = rows_where(reaches_U1)
        if not ends_below:
            num_included_U1 = _rounded_up(target_U1 - self.seen_U1, self.cutoff_mass_U1)
            return _TailEdge(self.at, has_edge_U1, self.cutoff_U1, num_included_U1, self.ties_GU1)
        assert self.mass_WV is not None, "wide rows are weighed"
        weights_UV = select(self.mass_WV, [self.wide.index(row) for row in ends_below])
        edge = search(self.rows.select(ends_below), weights_UV, select(target_U1, ends_below))
        score_U1 = replace(self.cutoff_U1, ends_below, edge.score_U1)
        above_U1 = replace(self.seen_U1, ends_below, edge.above_U1)
        mass_U1 = mass_of(score_U1 - self.peak_U1)
        below_GU1 = edge.equal_GU1 // select(mass_U1, ends_below).clamp_min(1)
        ties_GU1 = torch.stack(
            [
                replace(ties_U1, ends_below, below_U1)
                for ties_U1, below_U1 in zip(self.ties_GU1, below_GU1, strict=True)
            ]
        )
        num_included_U1 = _rounded_up(target_U1 - above_U1, mass_U1)
        return _TailEdge(self.at, has_edge_U1, score_U1, num_included_U1, ties_GU1)


def _rows_with_a_tail(rows: ShardedRows, kth_R1: Tensor | None, best: BestScores) -> list[int]:
    if best.is_complete:
        return []
    at = range(len(rows.rules)) if kth_R1 is None else rows_where(kth_R1 <= best.cutoff_R1)
    return [row for row in at if rows.rules[row].params.top_p < 1.0]


def _rounded_up(mass_U1: Tensor, unit_U1: Tensor) -> Tensor:
    return -(-mass_U1 // unit_U1.clamp_min(1))


def _masses(scores_WV: Tensor, peak_W1: Tensor, kth_W1: Tensor | None) -> Tensor:
    """Returns the masses of what top_k left."""
    mass_WV = torch.empty_like(scores_WV, dtype=torch.int64)
    for block in sampling_on(scores_WV.device).row_blocks(scores_WV.shape):
        scores_BV = scores_WV[block]
        mass_BV = mass_of(scores_BV - peak_W1[block])
        if kth_W1 is not None:
            mass_BV.masked_fill_(scores_BV < kth_W1[block], 0)
        mass_WV[block] = mass_BV
    return mass_WV
