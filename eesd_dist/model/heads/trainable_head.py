"""The parameters of an exit head: made from a target, trained, saved and read back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from eesd_dist.config import DType
from eesd_dist.errors import ConfigError
from eesd_dist.model.elementwise import soft_capped
from eesd_dist.model.heads.head_config import HeadConfig, HeadKind
from eesd_dist.model.heads.head_parts import (
    HEAD,
    LAYER_PREFIX,
    NORM,
    HeadParts,
)
from eesd_dist.model.kernels import (
    TORCH_DTYPES,
    plain_linear,
)
from eesd_dist.model.layers.layer import LayerWeights
from eesd_dist.model.layers.norms import RmsNorm
from eesd_dist.model.layers.paged_layers import forward_whole
from eesd_dist.model.parallel import Shard
from eesd_dist.model.rope import rotation_table
from eesd_dist.model.span import FINAL_NORM, read_lm_head
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import SINGLE_FILE, Checkpoint
from eesd_dist.transport.group_handles import SingleGroup


# Shapes: T rows, D hidden channels, V draft vocabulary, W target vocabulary, B sequences, L length.
class TrainableExitHead(nn.Module):
    """Parameters of a head. A shared LM head belongs to the target and is never trained."""

    rotation: Tensor
    draft_tokens: Tensor

    def __init__(
        self,
        config: HeadConfig,
        layer: LayerWeights,
        *,
        norm_D: Tensor,
        lm_head_VD: Tensor,
        vocab_ids_V: Tensor,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.norm_D = nn.Parameter(norm_D)
        self.lm_head_VD = nn.Parameter(lm_head_VD, requires_grad=config.kind != "shared")
        self.register_buffer("draft_tokens", vocab_ids_V, persistent=False)
        spec = config.layer
        table = rotation_table(
            spec.ropes[0], num_positions=spec.max_position_embeddings, device=norm_D.device
        )
        self.register_buffer("rotation", table, persistent=False)

    @property
    def exit_layer(self) -> int:
        return self.config.exit_layer

    @property
    def vocab_ids(self) -> Tensor | None:
        """[V] target token of each draft index; None when the draft vocabulary is the target's."""
        return self.draft_tokens if self.config.kind == "truncated" else None

    @classmethod
    def from_target(
        cls,
        target_path: Path,
        spec: ModelSpec,
        exit_layer: int,
        *,
        head: HeadKind = "shared",
        draft_vocab: Sequence[int] | None = None,
        dtype: DType = "float32",
    ) -> Self:
        """Initializes the head with the target's last layer, final norm and LM head."""
        vocab_ids_V = _draft_vocabulary(head, draft_vocab, spec.vocab_size)
        config = HeadConfig.for_target(
            target_path,
            spec,
            exit_layer=exit_layer,
            kind=head,
            num_tokens=len(vocab_ids_V),
        )
        shard = Shard.of(config.layer, rank=0, size=1)
        kind = TORCH_DTYPES[dtype]
        width = spec.hidden_size
        with Checkpoint(target_path) as checkpoint:
            prefix = f"model.layers.{spec.num_layers - 1}."
            layer = LayerWeights.read(checkpoint, prefix, config.layer, shard, kind)
            norm_D = checkpoint.read(FINAL_NORM, shape=(width,), dtype=kind)
            lm_head_WD = read_lm_head(checkpoint, spec, rows=None, dtype=kind)
        return cls(
            config,
            layer,
            norm_D=norm_D,
            lm_head_VD=lm_head_WD[vocab_ids_V],
            vocab_ids_V=vocab_ids_V,
        )

    @classmethod
    def read(
        cls, folder: Path, *, target: ModelSpec, target_path: Path, dtype: DType = "float32"
    ) -> Self:
        """Raises CheckpointError for a head that is damaged or does not fit the target."""
        parameters = HeadParts.read(
            folder, target=target, target_path=target_path, dtype=TORCH_DTYPES[dtype]
        )
        return cls(
            parameters.config,
            parameters.layer,
            norm_D=parameters.norm_D,
            lm_head_VD=parameters.lm_head_VD,
            vocab_ids_V=parameters.vocab_ids_V,
        )

    def training_forward(self, hidden_BLD: Tensor) -> Tensor:
        """Returns draft logits [B, L, V] of whole causal sequences of hidden states."""
        x_BLD = hidden_BLD.to(self.norm_D.dtype)
        layer = self.layer.layer(plain_linear, SingleGroup(), dtype=x_BLD.dtype)
        spec = self.config.layer
        windows = spec.sliding_windows
        scores = spec.traits.scores
        mixed_BLD = forward_whole([layer], windows, x_BLD, [self.rotation], scores=scores)
        norm = RmsNorm.before_logits(self.norm_D, spec, dtype=x_BLD.dtype)
        logits_TV = functional.linear(norm(mixed_BLD.flatten(0, 1)), self.lm_head_VD)
        if spec.traits.logit_softcap is not None:
            logits_TV = soft_capped(logits_TV, spec.traits.logit_softcap)
        return logits_TV.view(*hidden_BLD.shape[:2], -1)

    def save(
        self,
        folder: Path,
        *,
        dtype: DType = "bfloat16",
        provenance: Mapping[str, object] | None = None,
    ) -> None:
        """Writes config.json and model.safetensors in the speculators layout."""
        folder.mkdir(parents=True, exist_ok=True)
        kind = TORCH_DTYPES[dtype]
        tensors = self.layer.checkpoint_tensors(LAYER_PREFIX) | {NORM: self.norm_D.detach()}
        if self.config.kind != "shared":
            tensors[HEAD] = self.lm_head_VD.detach()
        stored = {name: x.to("cpu", kind).contiguous() for name, x in tensors.items()}
        if self.config.kind == "truncated":
            ids_V = self.draft_tokens.cpu()
            stored["d2t"] = ids_V - torch.arange(len(ids_V))
            stored["t2d"] = torch.zeros(self.config.verifier.vocab_size, dtype=torch.bool)
            stored["t2d"][ids_V] = True
        save_file(stored, folder / SINGLE_FILE, metadata={"format": "pt"})
        config = self.config.to_json(dtype=dtype, provenance=provenance or {})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _draft_vocabulary(kind: HeadKind, draft_vocab: Sequence[int] | None, vocab_size: int) -> Tensor:
    if kind != "truncated":
        if draft_vocab is not None:
            raise ConfigError(f"a draft vocabulary needs head 'truncated', found {kind!r}")
        return torch.arange(vocab_size)
    chosen = sorted(set(draft_vocab or ()))
    if not chosen or chosen[0] < 0 or chosen[-1] >= vocab_size:
        raise ConfigError(
            f"a truncated head needs token ids from 0 to {vocab_size - 1}, found {chosen[:3]}..."
        )
    return torch.tensor(chosen)
