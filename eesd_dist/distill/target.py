"""The frozen target over whole sequences: hidden states on the way, logits at the end.

The same `LlamaSpan` as in serving, once per stretch between two exit layers; no pages, no cache.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group import SingleGroup


class FrozenTarget:
    """Layers [0, L) of a checkpoint, cut where hidden states are wanted."""

    def __init__(self, path: Path, spec: ModelSpec, exits: Sequence[int]) -> None:
        cuts = [0, *sorted(set(exits)), spec.num_layers]
        self.spec = spec
        self._spans = [
            LlamaSpan.load(
                path,
                spec,
                first,
                last,
                group=SingleGroup(),
                dtype="float32",
                numerics="fast",
                device=torch.device("cpu"),
                num_pages=1,
                page_size=16,
            )
            for first, last in pairwise(cuts)
        ]

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor, exits: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Hidden states [B, T, D] after each wanted layer, and logits [B, T, V]."""
        hidden_BTD = self._spans[0].embed(tokens_BT.flatten()).view(*tokens_BT.shape, -1)
        kept: dict[int, Tensor] = {}
        for span in self._spans:
            hidden_BTD = span.forward_full(hidden_BTD)
            if span.last in exits:
                kept[span.last] = hidden_BTD
        logits_TV = self._spans[-1].logits(hidden_BTD.flatten(0, 1))
        return kept, logits_TV.view(*tokens_BT.shape, -1)
