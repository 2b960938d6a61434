"""The frozen target over whole sequences: hidden states after exit layers, and logits.

Uses the same `LlamaSpan` as serving, one per range of layers between two exit layers, without pages
or a cache.
"""

# Shapes: B sequences, T positions, D hidden size, V vocabulary, N rows, K best logits.

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import SingleGroup

_LOGITS_BYTES = 1 << 28
"""Approximate size of a block of logits: 4096 rows of 128k tokens would be 2 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetView:
    """The target's features of one sequence; row t is about the token after token t."""

    hidden: dict[int, Tensor]
    """Exit layer -> [T, D]."""
    top_ids_TK: Tensor
    """int32, the best first."""
    top_logits_TK: Tensor
    """float32."""
    lse_T: Tensor
    """float32 log-sum-exp over the whole vocabulary."""


class FrozenTarget:
    """Layers [0, L) of a checkpoint, split at the exit layers."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        exits: Sequence[int],
        *,
        dtype: DType = "float32",
        device: torch.device | None = None,
    ) -> None:
        cuts = [0, *sorted(set(exits)), spec.num_layers]
        self.spec = spec
        self.exits = tuple(sorted(set(exits)))
        self.device = device or torch.device("cpu")
        self._spans = [
            LlamaSpan.load(
                path,
                spec,
                first,
                last,
                group=SingleGroup(),
                dtype=dtype,
                numerics="fast",
                device=self.device,
                num_pages=1,
                page_size=16,
            )
            for first, last in pairwise(cuts)
        ]

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor, exits: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Returns hidden states [B, T, D] after each exit layer, and logits [B, T, V]."""
        by_exit, hidden_BTD = self._hidden(tokens_BT, exits)
        logits_NV = self._spans[-1].logits(hidden_BTD.flatten(0, 1))
        return by_exit, logits_NV.view(*tokens_BT.shape, -1)

    @torch.no_grad()
    def view(self, sequences: Sequence[Sequence[int]], *, top_k: int) -> list[TargetView]:
        """Returns the features of every sequence. Sequences should have similar lengths: shorter
        ones are padded at the end, which causal attention ignores."""
        lengths = [len(sequence) for sequence in sequences]
        tokens_BT = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens_BT[row, : lengths[row]] = torch.tensor(sequence)
        by_exit, hidden_BTD = self._hidden(tokens_BT, self.exits)
        rows_ND = torch.cat([hidden_BTD[row, :length] for row, length in enumerate(lengths)])
        ids_NK, logits_NK, lse_N = self._best(rows_ND, top_k=min(top_k, self.spec.vocab_size))
        splits = zip(*(torch.split(x, lengths) for x in (ids_NK, logits_NK, lse_N)), strict=True)
        return [
            TargetView(
                hidden={at: x_BTD[row, : lengths[row]].cpu() for at, x_BTD in by_exit.items()},
                top_ids_TK=ids_TK,
                top_logits_TK=logits_TK,
                lse_T=lse_T,
            )
            for row, (ids_TK, logits_TK, lse_T) in enumerate(splits)
        ]

    def _hidden(self, tokens_BT: Tensor, exits: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        tokens_BT = tokens_BT.to(self.device)
        hidden_BTD = self._spans[0].embed(tokens_BT.flatten()).view(*tokens_BT.shape, -1)
        by_exit: dict[int, Tensor] = {}
        for span in self._spans:
            hidden_BTD = span.forward_full(hidden_BTD)
            if span.last in exits:
                by_exit[span.last] = hidden_BTD
        return by_exit, hidden_BTD

    def _best(self, rows_ND: Tensor, *, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns best tokens (int32), their logits and each row's log-sum-exp, on the CPU."""
        block = max(1, _LOGITS_BYTES // (4 * self.spec.vocab_size))
        ids, logits, lse = [], [], []
        for block_ND in torch.split(rows_ND, block):
            logits_NV = self._spans[-1].logits(block_ND)
            best = logits_NV.topk(top_k, dim=-1)
            ids.append(best.indices.int().cpu())
            logits.append(best.values.cpu())
            lse.append(torch.logsumexp(logits_NV, dim=-1).cpu())
        return torch.cat(ids), torch.cat(logits), torch.cat(lse)
