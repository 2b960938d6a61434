"""Filters by rank and mass: top_k, top_p and min_p, over a vocabulary held by one or several ranks.

Each filter keeps the scores from a lowest one on. Of the tokens at the edge of a nucleus only the
smallest ids may be kept, and ranks hold ids in their order. The lowest score of a row is found
without joining the row:

1. Every rank sends its `NUM_BEST` largest scores (`best_scores`). They decide min_p, top_k up to
   `NUM_BEST`, and top_p where top_k leaves no more than was sent.
2. Otherwise top_p needs two integers of each rank (`nucleus`): the mass of its tokens, and how many
   equal the smallest score down to which all were sent. These decide the nucleus of a sharp row,
   and of one with many equal scores.
3. What is still open is searched (`score_search`), in a fixed number of exchanges.

Counts and masses are integers. Their sums do not depend on their order, so the same tokens are kept
on every device and on any sharding. Ranks take the same branches, since they decide by the same
gathered numbers. On a GPU the host waits for at most four decisions in a call.

Shapes: R rows, U rows with an excess, V columns of this rank's shard.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from eesd_dist.sampling.best_scores import BestScores, kth_scores
from eesd_dist.sampling.nucleus import Nucleus
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.sharded_rows import ShardedRows, column, replace, rows_where, select
from eesd_dist.transport.contracts import TensorGroup


def filtered(
    scores_RV: Tensor, rules: Sequence[RowRule], *, group: TensorGroup | None = None
) -> Tensor:
    """Returns float32 scores with filtered tokens at -inf.

    `group` are the ranks that hold the other columns of these rows, in the order of token ids; all
    of them call this with the same rules.
    """
    rows = ShardedRows(scores_RV, rules, None if group is None or group.size == 1 else group)
    best = BestScores.of(rows)
    lowest: list[Tensor] = []
    if any(rule.params.min_p > 0.0 for rule in rules):
        # on the host: device libraries round logarithms differently
        below = [
            math.log(rule.params.min_p) if rule.params.min_p > 0.0 else -torch.inf for rule in rules
        ]
        lowest.append(best.ranked_RC[:, :1] + column(below, like=scores_RV))
    kth_R1 = None
    if any(rule.params.top_k > 0 for rule in rules):
        kth_R1 = kth_scores(rows, best)  # ties with the k-th are kept
        lowest.append(kth_R1)
    if all(rule.params.top_p >= 1.0 for rule in rules):
        return _masked_below(scores_RV, lowest)
    nucleus = Nucleus.of(rows, kth_R1, best)
    masked_RV = _masked_below(scores_RV, [*lowest, nucleus.score_R1])
    cut = rows_where(nucleus.has_excess_R1)
    if not cut:
        return masked_RV
    room_U1, score_U1 = select(nucleus.room(rows.rank), cut), select(nucleus.score_R1, cut)
    return replace(masked_RV, cut, _without_excess(select(masked_RV, cut), score_U1, room_U1))


def _masked_below(scores_RV: Tensor, lowest: Sequence[Tensor]) -> Tensor:
    return scores_RV.masked_fill(scores_RV < reduce(torch.maximum, lowest), -torch.inf)


def _without_excess(scores_UV: Tensor, score_U1: Tensor, room_U1: Tensor) -> Tensor:
    """Masks all but the first tokens with this score."""
    is_equal_UV = scores_UV == score_U1
    is_excess_UV = is_equal_UV & (is_equal_UV.cumsum(dim=-1) > room_U1)
    return scores_UV.masked_fill(is_excess_UV, -torch.inf)
