"""Features of a round's rows in the verify stage: hidden states, and the target's best tokens.

Every rank takes part, since each has a part of the vocabulary: each contributes its own best tokens
and its log-sum-exp, so that no row of logits leaves its rank.
"""

# Shapes: T rows of a round, R rows that want features, D hidden size, V a rank's vocabulary,
# K best tokens, N of all ranks together.

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.model.span import LlamaSpan
from eesd_dist.transport.contracts import RoundHeader, RowFeatures, Segment, TensorGroup

_LOGITS_BYTES = 1 << 27
"""Approximate size of a block of a rank's logits."""


def features_of(
    header: RoundHeader,
    hidden_TD: Tensor,
    *,
    exit_TD: Mapping[int, Tensor],
    span: LlamaSpan,
    group: TensorGroup,
) -> RowFeatures:
    """Returns the same on every rank. `exit_TD`: the round's rows after each exit of the header."""
    rows_R = torch.tensor(feature_rows(header.segments), device=hidden_TD.device)
    last_RD = hidden_TD.index_select(0, rows_R)
    block = max(1, _LOGITS_BYTES // (4 * span.vocab_size_local))
    ids, logits, lse = zip(
        *(
            _best(block_RD, top_k=header.top_k, span=span, group=group)
            for block_RD in torch.split(last_RD, block)
        ),
        strict=True,
    )
    return RowFeatures(
        hidden=tuple(
            exit_TD[layer].index_select(0, rows_R).float().cpu().numpy() for layer in header.exits
        ),
        top_ids=np.concatenate(ids),
        top_logits=np.concatenate(logits),
        lse=np.concatenate(lse),
    )


def feature_rows(segments: Sequence[Segment]) -> list[int]:
    """Returns flat indices of the rows of all segments that want features."""
    indices: list[int] = []
    end = 0
    for segment in segments:
        start, end = end, end + segment.num_rows
        if segment.wants_features:
            indices.extend(range(start, end))
    return indices


def _best(
    hidden_RD: Tensor, *, top_k: int, span: LlamaSpan, group: TensorGroup
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns best tokens, their logits and the log-sum-exp, over the whole vocabulary."""
    logits_RV = span.logits(hidden_RD)
    num_own = min(top_k, span.vocab_size_local)
    values_RK, columns_RK = logits_RV.topk(num_own, dim=-1)
    ids_RK = columns_RK + span.vocab_start
    lse_R = logits_RV.logsumexp(dim=-1)
    if group.size > 1:
        # Ranks exchange equal shapes: a smaller part of the vocabulary is padded.
        pad = (0, top_k - num_own)
        values_RK = functional.pad(values_RK, pad, value=-torch.inf)
        ids_RK = functional.pad(ids_RK, pad)
        values_RN = torch.cat(group.all_gather(values_RK), dim=-1)
        ids_RN = torch.cat(group.all_gather(ids_RK), dim=-1)
        lse_R = torch.stack(group.all_gather(lse_R)).logsumexp(dim=0)
        values_RK, best_RK = values_RN.topk(top_k, dim=-1)
        ids_RK = ids_RN.gather(-1, best_RK)
    return (
        ids_RK.to(torch.int32).cpu().numpy(),
        values_RK.float().cpu().numpy(),
        lse_R.float().cpu().numpy(),
    )
