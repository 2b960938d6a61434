"""Measures of the exit head's certainty, for the controllers.

Plain numbers, computed from the raw logits before a token is drafted from them.

Shapes: S rows, V columns.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor


class Certainty(NamedTuple):
    """The exit head's certainty about its next token; fields as in `eesd_dist.types.Evidence`."""

    top1_prob: float
    top2_margin: float
    """Probability of the best minus that of the second best."""
    entropy: float
    """In nats."""


def evidence_of(logits_SV: Tensor) -> list[Certainty]:
    """Returns one Certainty per row of float32 logits, computed with NumPy on the host, which is
    three times as fast as torch there."""
    scores_SV = logits_SV.detach().cpu().numpy()
    rows_S = np.arange(scores_SV.shape[0])
    best_S = scores_SV.argmax(axis=-1)
    below_SV = scores_SV - scores_SV[rows_S, best_S][:, None]
    weights_SV = np.exp(below_SV)
    mass_S = weights_SV.sum(axis=-1)
    # a masked token has weight 0 and distance -inf; it must add 0, not nan
    expected_S = np.einsum("sv,sv->s", weights_SV, np.maximum(below_SV, -1e4))
    entropy_S = np.log(mass_S) - expected_S / mass_S
    weights_SV[rows_S, best_S] = 0.0
    second_S = weights_SV.max(axis=-1)
    return [
        Certainty(top1_prob=1.0 / mass, top2_margin=(1.0 - second) / mass, entropy=entropy)
        for mass, second, entropy in zip(
            mass_S.tolist(), second_S.tolist(), entropy_S.tolist(), strict=True
        )
    ]
