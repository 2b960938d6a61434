"""Logits processing before a token is chosen: edits, temperature, filters, in this order.

1. edits of single logits: forbidden tokens and logit_bias, then the repetition penalty (prompt and
   output), then presence and frequency penalties (output only), then masks (grammars);
2. temperature;
3. filters, each applied to what the one before left: top_k, top_p, min_p.

Order and meaning are those of vLLM and of transformers' logits processors. Rows of one kind are
processed together, and no row's result depends on the other rows. No randomness is used.

Shapes: S rows, V columns (a vocabulary, a shard of it, or a draft vocabulary), R rows of one kind.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.sampling.backend import sampling_on
from eesd_dist.sampling.filters import filtered
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.transport.contracts import TensorGroup

_Ids = npt.NDArray[np.int64]


class Columns(Protocol):
    """Maps columns of the logits to token ids and back."""

    def ids(self, like: Tensor) -> Tensor:
        """Returns the token ids of all columns, on `like`'s device."""
        ...

    def columns_of(self, token_ids: _Ids) -> _Ids:
        """Returns the column of each token; negative where it has none."""
        ...


class VocabularyShard:
    """Consecutive token ids from `start` on: a full vocabulary or a rank's shard of it."""

    def __init__(self, *, start: int, size: int) -> None:
        self._start = start
        self._size = size

    def ids(self, like: Tensor) -> Tensor:
        stop = self._start + self._size
        return torch.arange(self._start, stop, dtype=torch.int32, device=like.device)

    def columns_of(self, token_ids: _Ids) -> _Ids:
        columns = token_ids - self._start
        return np.where(columns < self._size, columns, -1)


class DraftVocabulary:
    """A truncated vocabulary: column c is target token `vocab_ids[c]`."""

    def __init__(self, vocab_ids: Tensor) -> None:
        self._vocab_ids = vocab_ids

    def ids(self, like: Tensor) -> Tensor:
        return self._vocab_ids.to(like.device)

    def columns_of(self, token_ids: _Ids) -> _Ids:
        ids_V = self._vocab_ids.cpu().numpy()
        by_id_V = np.argsort(ids_V)
        slot = np.searchsorted(ids_V, token_ids, sorter=by_id_V).clip(max=len(ids_V) - 1)
        columns: _Ids = by_id_V[slot]
        return np.where(ids_V[columns] == token_ids, columns, -1)


def processed(
    logits_SV: Tensor,
    rules: Sequence[RowRule],
    columns: Columns,
    *,
    group: TensorGroup | None = None,
) -> Tensor:
    """Returns edited logits divided by temperature, filtered tokens at -inf; greedy rows are only
    edited.

    Does not change its argument, and returns it when there is nothing to do. `group` are the ranks
    that hold the other columns, for filters; edits need no other columns.
    """
    scores_SV = edited(logits_SV, rules, columns)
    if any(rule.params.temperature != 1.0 and not rule.params.is_greedy for rule in rules):
        divisors = [1.0 if rule.params.is_greedy else rule.params.temperature for rule in rules]
        # by a tensor: a division by a number may become a multiplication by its reciprocal
        scores_SV = scores_SV / _column(divisors, like=scores_SV)
    rows = [row for row, rule in enumerate(rules) if rule.params.is_filtered]
    if not rows:
        return scores_SV
    if len(rows) == len(rules):
        return filtered(scores_SV, rules, group=group)
    scores_SV = scores_SV.clone() if scores_SV is logits_SV else scores_SV
    scores_SV[rows] = filtered(scores_SV[rows], [rules[row] for row in rows], group=group)
    return scores_SV


def edited(logits_SV: Tensor, rules: Sequence[RowRule], columns: Columns) -> Tensor:
    """Returns the logits with single ones edited; its argument where there is nothing to do."""
    if not any(rule.edits_logits for rule in rules):
        return logits_SV
    edited_SV = logits_SV.clone()
    _edit_(edited_SV, rules, columns)
    return edited_SV


class _Edits:
    """Edits of single logits, (row, token, amount), collected on the host and applied at once."""

    def __init__(self) -> None:
        self._rows: list[_Ids] = []
        self._ids: list[_Ids] = []
        self._amounts: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, ids: _Ids, amounts: npt.NDArray[np.float32] | float) -> None:
        self._rows.append(np.full(len(ids), row))
        self._ids.append(ids)
        self._amounts.append(np.broadcast_to(np.float32(amounts), (len(ids),)))

    def apply_(
        self, x_SV: Tensor, columns: Columns, change: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Replaces each logit by change(logit, amount), for tokens in this vocabulary."""
        if not self._rows:
            return
        column = columns.columns_of(np.concatenate(self._ids))
        is_local = column >= 0
        at = tuple(
            torch.from_numpy(index[is_local]).to(x_SV.device)
            for index in (np.concatenate(self._rows), column)
        )
        amount = torch.from_numpy(np.concatenate(self._amounts)[is_local]).to(x_SV.device)
        x_SV[at] = change(x_SV[at], amount)


def _edit_(x_SV: Tensor, rules: Sequence[RowRule], columns: Columns) -> None:
    biases, repetitions, outputs = _Edits(), _Edits(), _Edits()
    for row, rule in enumerate(rules):
        if rule.params.logit_bias or rule.forbidden:
            biases.add(row, *_biases_of(rule))
        if rule.params.repetition_penalty != 1.0:
            repetitions.add(row, np.unique(_ids(rule.history)), rule.params.repetition_penalty)
        if rule.params.presence_penalty != 0.0 or rule.params.frequency_penalty != 0.0:
            ids, counts = np.unique(_ids(rule.history[rule.num_prompt :]), return_counts=True)
            penalty = rule.params.frequency_penalty * counts + rule.params.presence_penalty
            outputs.add(row, ids, -penalty.astype(np.float32))
    biases.apply_(x_SV, columns, torch.add)
    repetitions.apply_(x_SV, columns, _discourage)
    outputs.apply_(x_SV, columns, torch.add)
    masked = [row for row, rule in enumerate(rules) if rule.mask]
    if masked:
        _mask_(x_SV, masked, [rules[row].mask for row in masked], columns)


def _mask_(x_SV: Tensor, rows: list[int], masks: Sequence[bytes], columns: Columns) -> None:
    """Excludes the tokens of these rows that their masks do not allow."""
    bytes_RB = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
    bytes_RB = bytes_RB.view(len(rows), -1).to(x_SV.device)
    ids_V = columns.ids(x_SV).long()
    bits_RV = bytes_RB[:, ids_V >> 3] >> (ids_V & 7).to(torch.uint8) & 1
    x_SV[rows] = x_SV[rows].masked_fill(bits_RV == 0, -torch.inf)


def _ids(tokens: Sequence[int]) -> _Ids:
    return np.array(tokens, dtype=np.int64)


def _biases_of(rule: RowRule) -> tuple[_Ids, npt.NDArray[np.float32]]:
    """Returns tokens and the amounts to add; -inf for forbidden tokens, whatever their bias."""
    bias_of: dict[int, float] = {}
    for token_id, bias in rule.params.logit_bias:
        bias_of[token_id] = bias_of.get(token_id, 0.0) + bias
    bias_of.update(dict.fromkeys(rule.forbidden, -np.inf))
    return np.array(list(bias_of), dtype=np.int64), np.array(list(bias_of.values()), np.float32)


def _discourage(x: Tensor, penalty: Tensor) -> Tensor:
    """Applies the repetition penalty of Keskar et al. 2019 (CTRL), section 4.1; negative logits are
    multiplied, as is common since."""
    return torch.where(x > 0, x / penalty, x * penalty)


def _column(values: Sequence[float], *, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(-1)


def log_total(x_SV: Tensor) -> Tensor:
    """Returns logsumexp of each row, [S, 1]; by log_softmax, which never mixes or splits rows.

    -inf for a row without a possible token: a shard that has none.
    """
    largest_S1 = x_SV.amax(dim=-1, keepdim=True)
    logprobs_SV = sampling_on(x_SV.device).log_probabilities(x_SV)
    total_S1 = largest_S1 - logprobs_SV.amax(dim=-1, keepdim=True)
    return torch.where(largest_S1 == -torch.inf, largest_S1, total_S1)
