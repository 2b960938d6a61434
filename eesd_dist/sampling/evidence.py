"""What the exit head's logits say of its own certainty, for the controllers.

Plain numbers, computed from the raw logits before a token is drafted from them. Whether to draft
it is decided elsewhere.

Shapes: S rows, V columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Certainty(NamedTuple):
    """How sure the head is of its next token; the fields of `eesd_dist.types.Evidence`."""

    top1_prob: float
    top2_margin: float
    """Probability of the best minus that of the second best."""
    entropy: float
    """In nats."""


def evidence_of(logits_SV: Tensor) -> list[Certainty]:
    """One Certainty per row, at the price of one softmax, one top-2 and one copy to the host."""
    logprobs_SV = logits_SV.log_softmax(dim=-1)
    best_S2 = logprobs_SV.topk(2, dim=-1).values.exp()
    # a masked token has probability 0 and logarithm -inf; it must add 0, not nan
    entropy_S = -(logprobs_SV.exp() * logprobs_SV.clamp_min_(-1e4)).sum(dim=-1)
    top1_S, top2_S = best_S2.unbind(dim=-1)
    return [
        Certainty(*row) for row in torch.stack([top1_S, top1_S - top2_S, entropy_S], -1).tolist()
    ]
