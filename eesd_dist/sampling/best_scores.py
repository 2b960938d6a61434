"""The largest scores of rows that are divided among ranks: the first exchange of the filters.

Shapes: R rows, V columns of this rank's shard, G ranks, C largest scores of one rank or of all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.sampling.backend import sampling_on
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.score_search import search
from eesd_dist.sampling.sharded_rows import ShardedRows, column, replace, rows_where, select

NUM_BEST = 128
"""Number of largest scores of a row that each rank sends."""

_WHOLE_ROWS = 1 << 14
"""A rank that has whole rows sorts them up to this width, where the rules may need it."""


@dataclass(frozen=True, slots=True)
class BestScores:
    """The largest scores of each row."""

    by_rank_GRC: Tensor
    ranked_RC: Tensor
    """Largest scores of all ranks, in descending order."""
    cutoff_R1: Tensor
    """All scores above this one are in `ranked_RC`; -inf where the whole row is."""
    is_complete: bool
    """True if whole rows are in `ranked_RC`, as far as the shapes tell."""

    @classmethod
    def of(cls, rows: ShardedRows) -> "BestScores":
        count = _num_best(rows)
        width = min(count, rows.num_columns)
        local_RC = _largest(rows.scores_RV, width)
        if width < rows.num_columns:
            cutoff_R1 = local_RC[:, -1:]
        else:
            cutoff_R1 = local_RC.new_full((local_RC.shape[0], 1), -torch.inf)
        if rows.group is None:
            is_complete = width == rows.num_columns
            return cls(local_RC.unsqueeze(0), local_RC, cutoff_R1, is_complete)
        # a shard of fewer columns sends tokens of probability 0
        padded_RC = functional.pad(local_RC, (0, count - width), value=-torch.inf)
        gathered_GRC = rows.gathered(torch.cat([padded_RC, cutoff_R1], dim=-1))
        by_rank_GRC, cutoff_GR1 = gathered_GRC.tensor_split([count], dim=-1)
        all_RC = by_rank_GRC.transpose(0, 1).flatten(1)
        ranked_RC = _largest(all_RC, all_RC.shape[-1])
        return cls(by_rank_GRC, ranked_RC, cutoff_GR1.amax(dim=0), is_complete=False)


def kth_scores(rows: ShardedRows, best: BestScores) -> Tensor:
    """Returns each row's k-th largest score [R, 1]; -inf where it has no top_k or fewer tokens."""
    num_ranked = best.ranked_RC.shape[-1]
    top_k = [max(rule.params.top_k, 0) for rule in rows.rules]
    k_R1 = column(top_k, like=rows.scores_RV, dtype=torch.int64)
    kth_R1 = best.ranked_RC.gather(-1, (k_R1 - 1).clamp_(0, num_ranked - 1))
    if min(top_k) == 0 or max(top_k) > num_ranked:
        kth_R1 = kth_R1.masked_fill((k_R1 == 0) | (k_R1 > num_ranked), -torch.inf)
    if best.is_complete or max(top_k) <= NUM_BEST:
        return kth_R1
    open_rows = rows_where((kth_R1 < best.cutoff_R1) & (k_R1 > 0))
    if not open_rows:
        return kth_R1
    opened = rows.select(open_rows)
    ones_UV = torch.ones_like(opened.scores_RV, dtype=torch.int32)
    return replace(kth_R1, open_rows, search(opened, ones_UV, select(k_R1, open_rows)).score_U1)


def is_wide(rule: RowRule) -> bool:
    """Returns True if top_k may leave more than the largest scores, ties aside."""
    return rule.params.top_k <= 0 or rule.params.top_k > NUM_BEST


def needs_best(rule: RowRule) -> bool:
    """Returns True if a row is filtered by rank or mass; min_p needs only the largest score."""
    return rule.params.top_k > 0 or rule.params.top_p < 1.0


def _num_best(rows: ShardedRows) -> int:
    needed_by = [rule for rule in rows.rules if needs_best(rule)]
    if not needed_by:
        return 1
    sorts_rows = rows.group is None and rows.num_columns <= _WHOLE_ROWS
    return rows.num_columns if sorts_rows and any(map(is_wide, needed_by)) else NUM_BEST


def _largest(x_RV: Tensor, count: int) -> Tensor:
    """Returns the largest numbers of each row in descending order."""
    if count == 1 < x_RV.shape[-1]:
        return x_RV.amax(dim=-1, keepdim=True)
    if count < x_RV.shape[-1]:
        return x_RV.topk(count, dim=-1).values
    return sampling_on(x_RV.device).sorted_rows(x_RV)
