"""Finds scores by the weight of what lies above them, in rows divided among ranks.

The weight of a token is 1, or its mass. A score is a number of 32 bits in the same order. All ranks
weigh the scores in equal parts of an interval of these numbers, and go on with the part in which
the sum over ranks reaches the target. Weights are integers, so that their sums do not depend on
their order or on how rows are divided.

Shapes: U rows, V columns of this rank's shard, G ranks, B parts of an interval with one more at
each end, for the scores outside it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.sampling.backend import sampling_on
from eesd_dist.sampling.sharded_rows import ShardedRows

SHARED_BITS = 8
"""Bits of a score that one exchange decides."""
LOCAL_BITS = 11
"""The same for a rank that has whole rows and exchanges nothing."""

_SCORE_BITS = 32
_MAGNITUDE = 0x7FFFFFFF

NUM_SEARCH_EXCHANGES = _SCORE_BITS // SHARED_BITS
NUM_SEARCH_WEIGHTS = NUM_SEARCH_EXCHANGES * ((1 << SHARED_BITS) + 2)
"""Number of weights that a rank sends for each row of a search."""


@dataclass(frozen=True, slots=True)
class ScoreEdge:
    """The largest score such that it and those above it have the target's weight."""

    score_U1: Tensor
    above_U1: Tensor
    """Weight of all larger scores, over all ranks."""
    equal_GU1: Tensor
    """Weight of the tokens with this score on each rank."""


def search(rows: ShardedRows, weights_UV: Tensor, target_U1: Tensor) -> ScoreEdge:
    """Searches each row; a target above the weight of the row finds its lowest score."""
    low_U1 = torch.full_like(target_U1, -(1 << (_SCORE_BITS - 1)))
    num_bits, step = _SCORE_BITS, LOCAL_BITS if rows.group is None else SHARED_BITS
    while True:
        shift = max(0, num_bits - step)
        num_bins = 1 << (num_bits - shift)
        local_UB = weights_UV.new_zeros(len(weights_UV), num_bins + 2)
        for block in sampling_on(weights_UV.device).row_blocks(weights_UV.shape):
            bin_UV = _keys(rows.scores_RV[block]).sub_(low_U1[block] - (1 << shift))
            bin_UV.bitwise_right_shift_(shift).clamp_(0, num_bins + 1)
            local_UB[block].scatter_add_(-1, bin_UV, weights_UV[block])
        weight_GUB = rows.gathered(local_UB)
        from_UB = weight_GUB.sum(dim=0).flip(-1).cumsum(dim=-1).flip(-1)
        target_U1 = target_U1.minimum(from_UB[:, :1])
        at_U1 = (from_UB >= target_U1).sum(dim=-1, keepdim=True).sub_(1).clamp_(1, num_bins)
        low_U1 = low_U1 + ((at_U1 - 1) << shift)
        if shift == 0:
            return ScoreEdge(
                score_U1=_scores(low_U1),
                above_U1=from_UB.gather(-1, at_U1 + 1),
                equal_GU1=weight_GUB.gather(-1, at_U1.expand(len(weight_GUB), -1, -1)),
            )
        num_bits = shift


def _keys(scores_UV: Tensor) -> Tensor:
    """Returns int64 numbers of 32 bits in the order of the scores; equal for 0.0 and -0.0."""
    bits_UV = (scores_UV + 0.0).view(torch.int32)
    return (bits_UV ^ (bits_UV >> 31).bitwise_and_(_MAGNITUDE)).long()


def _scores(key_U1: Tensor) -> Tensor:
    bits_U1 = key_U1.to(torch.int32)
    return (bits_U1 ^ (bits_U1 >> 31).bitwise_and_(_MAGNITUDE)).view(torch.float32)
