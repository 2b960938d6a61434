"""The coupled rule chooses every token: argmax over v of filtered_logits(v) / temperature +
gumbel(v).

The noise depends on (seed, position, token) only, and is left out at temperature 0. An exit head
that applies the same rule to its own logits drafts what the target is likely to choose. A draft is
accepted when both choose the same, so the text is that of plain decoding, whatever was drafted. A
shard of the vocabulary needs only its slice of the noise. Of equal scores the smallest token id
wins, on any sharding.

Sources: the Gumbel-max trick (Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv 1411.0030);
drafting and verifying with common noise (Daliri, Musco and Suresh, arXiv 2408.07978): accepted
with a probability between (1 - TV) / (1 + TV) and 1 - TV.

Shapes: S sampled rows, V columns of the logits, B best columns, n reported alternatives, G ranks, W
numbers per row that a rank sends to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.sampling.backend import BestTwo, sampling_on
from eesd_dist.sampling.noise import gumbel, key_words, noise_key
from eesd_dist.sampling.processors import (
    Columns,
    DraftVocabulary,
    VocabularyShard,
    edited,
    log_total,
    processed,
)
from eesd_dist.sampling.row_filters import filter_of, filters_by_row
from eesd_dist.sampling.row_rules import RowRule, rules_of
from eesd_dist.sampling.sharded_rows import select
from eesd_dist.transport.contracts import TensorGroup

__all__ = [
    "DraftChoice",
    "RowRule",
    "TokenChoice",
    "choose",
    "draft_choice",
    "first_max",
    "perturbed",
    "rules_of",
]

WIDEST_GAP = 30.0
"""Largest gap that is reported. Where filters leave one token the gap is infinite; noise never
bridges a gap of this size, so larger ones make no difference."""

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """The target's tokens, one per row, and their log-probabilities."""

    tokens: _Ints
    """[S]"""
    logprobs: _Floats
    """[S] under the raw logits at temperature 1; empty when no row asks for them."""
    top_ids: _Ints
    """[S, n] best first, n being the largest `top_logprobs` of the rows."""
    top_logprobs: _Floats
    """[S, n]"""

    def replaced(self, rows: Sequence[int], choice: "TokenChoice") -> "TokenChoice":
        """Returns the choice with that of another one in some rows. This one has no
        log-probabilities; where the other one has some, its other rows are padded as in
        `joined_choices`."""
        count, num_top = len(self.tokens), choice.top_ids.shape[1]
        tokens = self.tokens.copy()
        logprobs = np.zeros(count if choice.logprobs.size else 0, np.float32)
        top_ids = np.zeros((count, num_top), np.int32)
        top_logprobs = np.full((count, num_top), -np.inf, np.float32)
        tokens[rows], top_ids[rows], top_logprobs[rows] = (
            choice.tokens, choice.top_ids, choice.top_logprobs,
        )  # fmt: skip
        if choice.logprobs.size:
            logprobs[rows] = choice.logprobs
        return TokenChoice(
            tokens=tokens, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """The exit head's prediction of the target's choice."""

    tokens: Tensor
    """[S, b] int64 target ids, by descending score; the first is the head's choice."""
    scores: Tensor
    """[S, b] scores of those tokens; -inf where a filter leaves fewer."""
    gaps: Tensor
    """[S] score of the best minus that of the runner-up (`Evidence.gap`)."""


def joined_choices(choices: Sequence[TokenChoice]) -> TokenChoice:
    """Returns the choices after consecutive rows as one. Rows of a part that asks for less than
    another one are padded: with log-probabilities of 0, with alternatives of probability 0."""
    widest = max(choice.top_ids.shape[1] for choice in choices)
    has_logprobs = any(choice.logprobs.size for choice in choices)

    def wide(values_Sn: npt.NDArray[Any], fill: float) -> npt.NDArray[Any]:
        missing = widest - values_Sn.shape[1]
        return np.pad(values_Sn, ((0, 0), (0, missing)), constant_values=fill)

    def logprobs_of(choice: TokenChoice) -> _Floats:
        has_values = choice.logprobs.size or not has_logprobs
        return choice.logprobs if has_values else np.zeros(len(choice.tokens), np.float32)

    return TokenChoice(
        tokens=np.concatenate([choice.tokens for choice in choices]),
        logprobs=np.concatenate([logprobs_of(choice) for choice in choices]),
        top_ids=np.concatenate([wide(choice.top_ids, 0) for choice in choices]),
        top_logprobs=np.concatenate([wide(choice.top_logprobs, -np.inf) for choice in choices]),
    )


def choose(
    logits_SV: Tensor,
    rules: Sequence[RowRule],
    *,
    group: TensorGroup | None = None,
    vocab_start: int = 0,
) -> TokenChoice:
    """Applies the rule to float32 logits of this rank's shard; all ranks return the same result.

    The shards of `group` are in the order of their token ids, and may differ in width.
    """
    assert len(rules) == logits_SV.shape[0], "one rule per row"
    if group is None or group.size == 1:
        return _choose_on_rank(logits_SV, rules)
    return _choose_over_ranks(logits_SV, rules, group=group, vocab_start=vocab_start)


def draft_choice(
    logits_SV: Tensor,
    rules: Sequence[RowRule],
    *,
    vocab_ids: Tensor | None = None,
    width: int = 1,
) -> DraftChoice:
    """Applies the rule to the exit head's logits, with the noise of the target's token ids.

    `vocab_ids` [V] is the target token of each column of a truncated draft vocabulary; `width` is
    the number of tokens to return per row.
    """
    best = _best_two(logits_SV, rules, vocab_ids) if width == 1 else None
    if best is not None and not np.isnan(best.scores_S2[:, 0]).any():
        scores_S2 = best.scores_S2
        return DraftChoice(
            tokens=torch.from_numpy(best.tokens_S2[:, :1]),
            scores=torch.from_numpy(scores_S2[:, :1]),
            gaps=torch.from_numpy(_gaps(scores_S2)),
        )
    columns = _columns_of(logits_SV, vocab_ids)
    scores_SV = perturbed(logits_SV, rules, columns)
    best_SB, values_SB = sampling_on(scores_SV.device).first_maxima(scores_SV, max(width, 2))
    tokens_SB = best_SB[:, :width]
    if vocab_ids is not None:
        tokens_SB = vocab_ids.to(tokens_SB.device).long()[tokens_SB]
    gaps_S = values_SB[:, 0] - values_SB[:, -1 if values_SB.shape[1] < 2 else 1]
    gaps_S.clamp_(max=WIDEST_GAP)
    return DraftChoice(tokens=tokens_SB, scores=values_SB[:, :width], gaps=gaps_S)


def _best_two(
    logits_SV: Tensor, rules: Sequence[RowRule], vocab_ids: Tensor | None
) -> BestTwo | None:
    """Returns the best two of each row in one call, if the device has such a call."""
    call = sampling_on(logits_SV.device).choice_call
    if logits_SV.shape[-1] < 2 or call is None:
        return None
    filters = filters_by_row([filter_of(rule.params) for rule in rules])
    divisors = [rule.params.noise_temperature for rule in rules]
    keys = [
        noise_key(rule.params.seed, rule.position) if divisor else 0
        for rule, divisor in zip(rules, divisors, strict=True)
    ]
    edited_SV = edited(logits_SV, rules, _columns_of(logits_SV, vocab_ids))
    return call(edited_SV, divisors, key_words(keys), vocab_ids, filters)


def score_gaps(best_S4: _Ints) -> _Floats:
    """Returns the gaps [S] of `DraftChoice` of the two best tokens and the bits of their scores; 0
    where the first score is NaN."""
    gaps_S: _Floats = np.nan_to_num(_gaps(best_S4[:, 2:].view(np.float32)), nan=0.0)
    return gaps_S


def _gaps(scores_S2: _Floats) -> _Floats:
    with np.errstate(invalid="ignore"):  # NaN where no token is possible
        gaps_S: _Floats = np.minimum(scores_S2[:, 0] - scores_S2[:, 1], np.float32(WIDEST_GAP))
    return gaps_S


def perturbed(
    logits_SV: Tensor,
    rules: Sequence[RowRule],
    columns: Columns,
    *,
    group: TensorGroup | None = None,
) -> Tensor:
    """Returns the scores to maximise: processed logits, plus noise in rows that are not greedy.

    `group` are the ranks that hold the other columns, for filters.
    """
    scores_SV = processed(logits_SV, rules, columns, group=group)
    noisy = [row for row, rule in enumerate(rules) if not rule.params.is_greedy]
    if not noisy:
        return scores_SV
    keys = [noise_key(rules[row].params.seed, rules[row].position) for row in noisy]
    noise_RV = gumbel(keys, columns.ids(scores_SV))
    if len(noisy) == len(rules):
        return noise_RV.add_(scores_SV)
    scores_SV = scores_SV.clone() if scores_SV is logits_SV else scores_SV
    scores_SV[noisy] += noise_RV
    return scores_SV


def first_max(x_SV: Tensor) -> Tensor:
    """Returns the first column [S] of each row's maximum."""
    return sampling_on(x_SV.device).first_max(x_SV)


def _columns_of(logits_SV: Tensor, vocab_ids: Tensor | None) -> Columns:
    if vocab_ids is None:
        return VocabularyShard(start=0, size=logits_SV.shape[-1])
    return DraftVocabulary(vocab_ids)


def _num_top(rules: Sequence[RowRule]) -> int | None:
    """Returns how many alternatives to report per row; None without log-probabilities."""
    return max((r.top_logprobs for r in rules if r.top_logprobs is not None), default=None)


def _choose_on_rank(logits_SV: Tensor, rules: Sequence[RowRule]) -> TokenChoice:
    num_top = _num_top(rules)
    winners = _best_two(logits_SV, rules, None)
    if winners is None:
        tokens = _tokens(logits_SV, rules).cpu().numpy()
    else:
        tokens = winners.tokens_S2[:, 0].copy()
        if len(undecided := np.flatnonzero(np.isnan(winners.scores_S2[:, 0])).tolist()):
            open_UV = select(logits_SV, undecided)
            open_rules = [rules[row] for row in undecided]
            tokens[undecided] = _tokens(open_UV, open_rules).cpu().numpy()
    for row, rule in enumerate(rules):
        if rule.forced >= 0:
            tokens[row] = rule.forced
    if num_top is None:
        return silent_choice(tokens)
    tokens_S = torch.from_numpy(tokens).to(logits_SV.device)
    logprobs_SV = sampling_on(logits_SV.device).log_probabilities(logits_SV)
    best = logprobs_SV.topk(min(num_top, logits_SV.shape[-1]), dim=-1)
    top_ids, top_logprobs = _ordered(
        best.indices.double().cpu().numpy(), best.values.double().cpu().numpy()
    )
    return TokenChoice(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs_SV.gather(-1, tokens_S.unsqueeze(-1)).squeeze(-1).cpu().numpy(),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top_logprobs.astype(np.float32),
    )


def _tokens(logits_SV: Tensor, rules: Sequence[RowRule]) -> Tensor:
    columns = _columns_of(logits_SV, None)
    blocks = sampling_on(logits_SV.device).row_blocks(logits_SV.shape)
    if len(blocks) == 1:
        return first_max(perturbed(logits_SV, rules, columns))
    return torch.cat(
        [first_max(perturbed(logits_SV[block], rules[block], columns)) for block in blocks]
    )


def silent_choice(tokens: npt.NDArray[np.integer]) -> TokenChoice:
    """Returns a choice of these tokens without log-probabilities."""
    return TokenChoice(
        tokens=tokens.astype(np.int32),
        logprobs=np.empty(0, np.float32),
        top_ids=np.empty((len(tokens), 0), np.int32),
        top_logprobs=np.empty((len(tokens), 0), np.float32),
    )


def _choose_over_ranks(
    logits_SV: Tensor, rules: Sequence[RowRule], *, group: TensorGroup, vocab_start: int
) -> TokenChoice:
    """Chooses from all shards: ranks exchange a few numbers per row, and what the filters need."""
    if logits_SV.shape[-1] == 0:  # takes part with a token of probability 0
        logits_SV = logits_SV.new_full((len(rules), 1), -torch.inf)
    columns = VocabularyShard(start=vocab_start, size=logits_SV.shape[-1])
    scores_SV = perturbed(logits_SV, rules, columns, group=group)
    at_S1 = first_max(scores_SV).unsqueeze(-1)
    best_S1 = scores_SV.gather(-1, at_S1).double()
    for row, rule in enumerate(rules):
        if rule.forced >= 0:  # the rank that has this token wins
            column = rule.forced - vocab_start
            is_local = 0 <= column < logits_SV.shape[-1]
            at_S1[row], best_S1[row] = (column, torch.inf) if is_local else (0, -torch.inf)
    # float64 holds a score, a token id and a raw logit
    best_S3 = torch.cat(
        [
            best_S1,
            (at_S1 + vocab_start).double(),
            logits_SV.gather(-1, at_S1).double(),
        ],
        dim=-1,
    )
    num_top = _num_top(rules)
    report_SW = [] if num_top is None else [_report(logits_SV, num_top, vocab_start)]
    local_SW = torch.cat([best_S3, *report_SW], dim=-1)
    gathered_GSW = torch.stack(group.all_gather(local_SW)).cpu().numpy()
    # shards are in the order of token ids: the first maximum has the smallest id
    winner_S = gathered_GSW[:, :, 0].argmax(axis=0)
    _, token_S, raw_S = gathered_GSW[winner_S, np.arange(len(rules)), :3].T
    if num_top is None:
        return silent_choice(token_S.astype(np.int64))
    return _reported_choice(token_S, raw_S, gathered_GSW[:, :, 3:], num_top=num_top)


def _report(logits_SV: Tensor, num_top: int, vocab_start: int) -> Tensor:
    """Returns what log-probabilities need from a shard: its logsumexp, its `num_top` largest logits
    and their ids, padded to the same width on every rank."""
    best = logits_SV.topk(min(num_top, logits_SV.shape[-1]), dim=-1)
    missing = (0, num_top - best.values.shape[-1])
    values_Sn = functional.pad(best.values.double(), missing, value=-torch.inf)
    ids_Sn = functional.pad((best.indices + vocab_start).double(), missing)
    return torch.cat([log_total(logits_SV).double(), values_Sn, ids_Sn], dim=-1)


def _reported_choice(
    token_S: npt.NDArray[np.float64],
    raw_S: npt.NDArray[np.float64],
    report_GSW: npt.NDArray[np.float64],
    *,
    num_top: int,
) -> TokenChoice:
    total_S = np.logaddexp.reduce(report_GSW[:, :, 0], axis=0)
    values_GSn, ids_GSn = np.split(report_GSW[:, :, 1:], [num_top], axis=-1)
    num_top = min(num_top, int(np.isfinite(values_GSn).sum(axis=(0, 2)).min()))
    top_ids, top_logits = _ordered(
        np.concatenate(list(ids_GSn), axis=-1), np.concatenate(list(values_GSn), axis=-1)
    )
    return TokenChoice(
        tokens=token_S.astype(np.int32),
        logprobs=(raw_S - total_S).astype(np.float32),
        top_ids=top_ids[:, :num_top].astype(np.int32),
        top_logprobs=(top_logits - total_S[:, None])[:, :num_top].astype(np.float32),
    )


def _ordered(
    ids: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns each row sorted by descending value, equal values by ascending id."""
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1)


def top1_probs(logits_SV: Tensor) -> list[float]:
    """Returns one probability per row of float32 logits, computed with NumPy on the host, which is
    three times as fast as torch there."""
    scores_SV = logits_SV.detach().cpu().numpy()
    below_SV = scores_SV - scores_SV.max(axis=-1, keepdims=True)
    probs: list[float] = (1.0 / np.exp(below_SV).sum(axis=-1)).tolist()
    return probs
