"""Rejection sampling, the published method to verify a draft; an alternative to the coupled rule.

A token drawn from the head's distribution q is accepted with probability min(1, p / q) under the
target's p. The first rejected one is replaced by a draw from max(0, p - q), normalised; a fully
accepted draft is followed by a draw from p. Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1;
Chen et al. 2023 (arXiv 2302.01318), Algorithm 2. p and q are the *processed* distributions, after
penalties, temperature and filters. The text has the target's distribution, but unlike the coupled
rule's it depends on what was drafted.

Every random number is keyed by (seed, position, purpose), so a run can be repeated. Drafts are
keyed by their depth as well: a position that is drafted again in a later round gets new noise.

Needs whole rows of the target: ranks that share a vocabulary join their logits first, unlike under
the coupled rule.

Shapes: S rows of the target, K drafted tokens, C chains, V the target's vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from eesd_dist.sampling.noise import Stream, gumbel, noise_key, uniform
from eesd_dist.sampling.processors import Columns, DraftVocabulary, VocabularyShard, processed
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import first_max
from eesd_dist.types import TokenId, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSample:
    """Tokens drawn from the head's distribution, and that distribution."""

    tokens: Tensor
    """[S] int64 target ids."""
    probs: Tensor
    """[S, V] over the target's vocabulary, float32; argument draft_probs_KV of `reject_all`."""


def draft_sample(
    logits_SV: Tensor,
    rules: Sequence[RowRule],
    depths: Sequence[int],
    *,
    vocab_ids: Tensor | None = None,
    vocab_size: int | None = None,
) -> DraftSample:
    """Draws one token per row, `depths[s]` tokens after the last known one.

    A truncated draft vocabulary is given by `vocab_ids` and the target's `vocab_size`.
    """
    columns: Columns = VocabularyShard(start=0, size=logits_SV.shape[-1])
    if vocab_ids is not None:
        columns = DraftVocabulary(vocab_ids)
    probs_SV = probabilities(logits_SV, rules, columns)
    keys = [
        noise_key(rule.params.seed, rule.position, Stream.DRAFT + depth)
        for rule, depth in zip(rules, depths, strict=True)
    ]
    tokens_S = _draw(probs_SV, keys, columns)
    if vocab_ids is None:
        return DraftSample(tokens=tokens_S, probs=probs_SV)
    assert vocab_size is not None, "a truncated draft vocabulary needs the target's vocab_size"
    ids_V = vocab_ids.to(probs_SV.device).long()
    whole_SV = probs_SV.new_zeros(len(rules), vocab_size).index_copy_(1, ids_V, probs_SV)
    return DraftSample(tokens=ids_V[tokens_S], probs=whole_SV)


def reject_all(
    target_logits_SV: Tensor,
    draft_probs_KV: Tensor,
    drafts: Sequence[Sequence[int]],
    rules: Sequence[RowRule],
) -> list[Verdict]:
    """Verifies many chains at once; rows are ordered by chain, each with its bonus row last."""
    first_rows = list(accumulate((len(draft) + 1 for draft in drafts), initial=0))
    assert first_rows.pop() == target_logits_SV.shape[0] == len(rules), "K + 1 rows per chain"
    columns = VocabularyShard(start=0, size=target_logits_SV.shape[-1])
    p_SV = probabilities(target_logits_SV, rules, columns)
    draft_rows = [
        first + depth
        for first, draft in zip(first_rows, drafts, strict=True)
        for depth in range(len(draft))
    ]
    q_SV = torch.zeros_like(p_SV)  # stays 0 in bonus rows, where the residual is p
    q_SV[draft_rows] = draft_probs_KV
    tokens = [token for draft in drafts for token in draft]
    survives = iter(_survives(p_SV, q_SV, draft_rows, tokens, rules))
    counts = [_num_leading([next(survives) for _ in draft]) for draft in drafts]
    next_rows = [first + count for first, count in zip(first_rows, counts, strict=True)]
    keys = [noise_key(rules[row].params.seed, rules[row].position) for row in next_rows]
    next_tokens = _draw(_residual(p_SV[next_rows], q_SV[next_rows]), keys, columns).tolist()
    return [
        Verdict(num_drafted=len(draft), num_accepted=count, next_token=TokenId(token))
        for draft, count, token in zip(drafts, counts, next_tokens, strict=True)
    ]


def probabilities(logits_SV: Tensor, rules: Sequence[RowRule], columns: Columns) -> Tensor:
    """Returns the distribution each row's token is drawn from; one token has all when greedy."""
    scores_SV = processed(logits_SV, rules, columns)
    probs_SV = scores_SV.softmax(dim=-1)
    greedy = [row for row, rule in enumerate(rules) if rule.params.is_greedy]
    if greedy:
        probs_SV[greedy] = 0.0
        probs_SV[greedy, first_max(scores_SV)[greedy]] = 1.0
    return probs_SV


def _survives(
    p_SV: Tensor,
    q_SV: Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    rules: Sequence[RowRule],
) -> list[bool]:
    """Returns for each drafted token whether it is accepted, regardless of those before it."""
    coins = [
        uniform(noise_key(rules[r].params.seed, rules[r].position, Stream.ACCEPT)) for r in rows
    ]
    coin_K = torch.tensor(coins, dtype=torch.float64, device=p_SV.device)
    p_K, q_K = p_SV[rows, tokens].double(), q_SV[rows, tokens].double()
    is_accepted: list[bool] = (
        coin_K * q_K < p_K
    ).tolist()  # u < p / q, with no division by a tiny q
    return is_accepted


def _num_leading(claims: Sequence[bool]) -> int:
    """Returns how many are true before the first false one."""
    return sum(takewhile(bool, claims))


def _residual(p_CV: Tensor, q_CV: Tensor) -> Tensor:
    """Returns max(0, p - q), not normalised; p where rounding left only zeros."""
    residual_CV = (p_CV - q_CV).clamp_min_(0.0)
    return torch.where(residual_CV.sum(dim=-1, keepdim=True) > 0.0, residual_CV, p_CV)


def _draw(weights_SV: Tensor, keys: Sequence[int], columns: Columns) -> Tensor:
    """Returns columns [S] drawn in proportion to the weights, by the Gumbel-max trick."""
    return first_max(gumbel(keys, columns.ids(weights_SV)).add_(weights_SV.log()))
