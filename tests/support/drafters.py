"""Targets with drafters that always, sometimes or never agree: real checkpoints, tiny and random.

In the agreeing target, the layers after the exit add nothing (their output projections are zero),
and neither does the layer of the head: the head chooses like the target. Noise on its LM head makes
it agree sometimes; an LM head with shifted rows makes it agree never.
"""

from pathlib import Path
from typing import Literal

import torch

from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_checkpoints import tiny_model

Agreement = Literal["always", "sometimes", "never"]
EXIT_LAYER = 2


def save_target(
    folder: Path,
    *,
    num_layers: int = 4,
    vocab_size: int = 96,
    num_positions: int = 256,
    tail_scale: float = 0.0,
) -> Path:
    """Writes a Llama in which the layers from EXIT_LAYER on are scaled by `tail_scale`. With 0 they
    add nothing, and the content of their pages does not matter."""
    model = tiny_model(
        "llama",
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        max_position_embeddings=num_positions,
    )
    with torch.no_grad():
        for layer in model.model.layers[EXIT_LAYER:]:
            layer.self_attn.o_proj.weight.mul_(tail_scale)
            layer.mlp.down_proj.weight.mul_(tail_scale)
    model.save_pretrained(folder)
    return folder


def save_head(
    target: Path, folder: Path, agreement: Agreement, *, draft_vocab: list[int] | None = None
) -> Path:
    head = TrainableExitHead.from_target(
        target,
        ModelSpec.from_folder(target),
        EXIT_LAYER,
        head="own" if draft_vocab is None else "truncated",
        draft_vocab=draft_vocab,
    )
    with torch.no_grad():
        if agreement == "sometimes":
            noise = torch.randn(head.lm_head_VD.shape, generator=torch.Generator().manual_seed(0))
            head.lm_head_VD.add_(0.6 * head.lm_head_VD.std() * noise)
        elif agreement == "never":
            head.lm_head_VD.copy_(head.lm_head_VD.roll(1, dims=0))
    head.save(folder, dtype="float32")
    return folder
