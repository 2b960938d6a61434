"""Part of an exit head on one rank, as its files have it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from eesd_dist.errors import CheckpointError
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.layers.layer import LayerWeights
from eesd_dist.model.parallel import Shard, rank_range
from eesd_dist.model.span import read_lm_head
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import SINGLE_FILE, Checkpoint, Shapes, warn_of_unused

LAYER_PREFIX = "layers.0."
NORM = "norm.weight"
HEAD = "lm_head.weight"
_VOCABULARY = ("d2t", "t2d")
"""Offsets of the draft vocabulary's ids, and which of the target's ids it has."""


# Shapes: D hidden channels, V draft vocabulary, W target vocabulary.
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """A rank's part of a head's weights: heads and channels of its layer, rows of its LM head.
    Norms are on every rank."""

    config: HeadConfig
    layer: LayerWeights
    norm_D: Tensor
    lm_head_VD: Tensor
    vocab_ids_V: Tensor
    """Covers the whole draft vocabulary on every rank."""

    @classmethod
    def read(
        cls,
        folder: Path,
        *,
        target: ModelSpec,
        target_path: Path,
        dtype: torch.dtype,
        rank: int = 0,
        size: int = 1,
    ) -> Self:
        config = HeadConfig.read(folder, target=target, target_path=target_path)
        shard = Shard.of(config.layer, rank=rank, size=size)
        rows = rank_range(config.draft_vocab_size, rank, size)
        width = target.hidden_size
        with Checkpoint(folder) as checkpoint:
            layer = LayerWeights.read(checkpoint, LAYER_PREFIX, config.layer, shard, dtype)
            norm_D = checkpoint.read(NORM, shape=(width,), dtype=dtype)
            vocab_ids_V = _read_vocabulary(checkpoint, config, target.vocab_size)
            if config.kind != "shared":
                shape = (config.draft_vocab_size, width)
                lm_head_VD = checkpoint.read(HEAD, shape=shape, rows=rows, dtype=dtype)
            if rank == 0:
                _report_stored(checkpoint, config, shard)
        if config.kind == "shared":
            with Checkpoint(target_path) as checkpoint:
                lm_head_VD = read_lm_head(checkpoint, target, rows=rows, dtype=dtype)
        return cls(
            config=config,
            layer=layer,
            norm_D=norm_D,
            lm_head_VD=lm_head_VD,
            vocab_ids_V=vocab_ids_V,
        )


def _report_stored(checkpoint: Checkpoint, config: HeadConfig, shard: Shard) -> None:
    """Logs stored tensors that the head does not use."""
    shapes = Shapes()
    LayerWeights.read(shapes, LAYER_PREFIX, config.layer, shard, torch.float32)
    used = shapes.of.keys() | {NORM}
    used |= set() if config.kind == "shared" else {HEAD}
    used |= set(_VOCABULARY) if config.kind == "truncated" else set()
    warn_of_unused(checkpoint, used)


def _read_vocabulary(checkpoint: Checkpoint, config: HeadConfig, vocab_size: int) -> Tensor:
    if config.kind != "truncated":
        return torch.arange(vocab_size)
    size = config.draft_vocab_size
    offsets, is_drafted = _VOCABULARY
    ids_V = checkpoint.read_raw(offsets, shape=(size,)).long() + torch.arange(size)
    is_drafted_W = checkpoint.read_raw(is_drafted, shape=(vocab_size,)).bool()
    if not torch.equal(is_drafted_W.nonzero().view(-1), ids_V):
        raise CheckpointError(
            file=checkpoint.folder / SINGLE_FILE,
            found="d2t and t2d with different tokens",
            expected="the same draft vocabulary in both",
        )
    return ids_V
