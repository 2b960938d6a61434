"""Causal attention within whole sequences, without pages. Supports autograd."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.model.elementwise import soft_capped
from eesd_dist.model.families.family import PLAIN_SCORES, Scores

# Shapes: T rows, H heads of all kinds (queries, then keys, then values), K KV heads, G queries per
# KV head, E channels of a head, N keys, B sequences, L their length, Q queries of one KV head.
Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""queries_BKQE, keys_BKNE, values_BKNE and the additive mask -> mixed_BKQE."""


def mix_of(scores: Scores) -> Mix:
    """Returns the library's attention, or plain operations where it does not support the scores."""
    if scores.softcap is not None:
        return partial(_mix_capped, scale=scores.scale, softcap=scores.softcap)
    library = functional.scaled_dot_product_attention
    return library if scores.scale is None else partial(library, scale=scores.scale)


def _mix_capped(
    queries_BKQE: Tensor,
    keys_BKNE: Tensor,
    values_BKNE: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    softcap: float,
) -> Tensor:
    factor = queries_BKQE.shape[-1] ** -0.5 if scale is None else scale
    products_BKQN = (queries_BKQE @ keys_BKNE.transpose(-1, -2)).float() * factor
    scores_BKQN = soft_capped(products_BKQN, softcap)
    if mask is not None:
        scores_BKQN = scores_BKQN + mask
    return scores_BKQN.softmax(-1).to(values_BKNE.dtype) @ values_BKNE


def attend_whole(
    heads_THE: Tensor,
    *,
    num_sequences: int,
    num_kv_heads: int,
    window: int | None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Computes causal attention within `num_sequences` equally long sequences, without a cache."""
    num_rows, num_heads, head_dim = heads_THE.shape
    queries_per_kv = num_heads // num_kv_heads - 2
    shape_BLGKE = (num_sequences, num_rows // num_sequences, -1, num_kv_heads, head_dim)
    heads_BGKLE = heads_THE.view(shape_BLGKE).permute(0, 2, 3, 1, 4)
    queries_BHLE = heads_BGKLE[:, :queries_per_kv].flatten(1, 2)
    keys_BHLE, values_BHLE = (
        heads_BGKLE[:, at].repeat(1, queries_per_kv, 1, 1)
        for at in (queries_per_kv, queries_per_kv + 1)
    )
    if window is None and scores.softcap is None:
        mixed_BHLE = functional.scaled_dot_product_attention(
            queries_BHLE, keys_BHLE, values_BHLE, is_causal=True, scale=scores.scale
        )
    else:
        length = shape_BLGKE[1]
        mask_LL = _causal_mask(length, window or length, like=heads_THE)
        mixed_BHLE = mix_of(scores)(queries_BHLE, keys_BHLE, values_BHLE, mask_LL)
    return mixed_BHLE.transpose(1, 2).reshape(num_rows, -1)


def _causal_mask(length: int, window: int, *, like: Tensor) -> Tensor:
    at_L = torch.arange(length, device=like.device)
    distance_LL = at_L[:, None] - at_L[None, :]
    is_hidden_LL = (distance_LL < 0) | (distance_LL >= window)
    return like.new_zeros(length, length).masked_fill_(is_hidden_LL, -torch.inf)
