"""The exit head: one decoder layer, a norm and an LM head that guess from early hidden states.

`TrainableExitHead` is the parameters (made from a target, trained, saved and read back);
`ExitHead` is a head ready to draft, with its own keys and values. Both run the same layer. Neither
knows how many tokens to guess or what became of them.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.head_config import HeadConfig, HeadKind
from eesd_dist.model.kernels import TORCH_DTYPES, LinearPacker, plain_linear
from eesd_dist.model.layer import LayerWeights, RmsNorm
from eesd_dist.model.parallel import Shard
from eesd_dist.model.rope import rotation_table
from eesd_dist.model.rows import RowPlan
from eesd_dist.model.span import (
    FINAL_NORM,
    LogitsHead,
    PagedLayers,
    forward_whole,
    read_lm_head,
)
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import SINGLE_FILE, Checkpoint
from eesd_dist.transport.group import SingleGroup

LAYER_PREFIX = "layers.0."
NORM = "norm.weight"
HEAD = "lm_head.weight"


# Shapes: T rows, D hidden channels, V draft vocabulary, W target vocabulary, B sequences, L length.
class TrainableExitHead(nn.Module):
    """A head's parameters. The shared LM head belongs to the target and is never trained."""

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
            spec.rope, num_positions=spec.max_position_embeddings, device=norm_D.device
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
        """Begins as the target's last layer, final norm and LM head."""
        vocab_ids_V = _draft_vocabulary(head, draft_vocab, spec.vocab_size)
        config = HeadConfig.for_target(
            target_path, spec, exit_layer=exit_layer, kind=head, num_tokens=len(vocab_ids_V)
        )
        shard = Shard.of(config.layer, rank=0, size=1)
        kind = TORCH_DTYPES[dtype]
        with Checkpoint(target_path) as checkpoint:
            prefix = f"model.layers.{spec.num_layers - 1}."
            layer = LayerWeights.read(checkpoint, prefix, config.layer, shard, kind)
            norm_D = checkpoint.read(FINAL_NORM, shape=(spec.hidden_size,), dtype=kind)
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
        config = HeadConfig.read(folder, target=target, target_path=target_path)
        shard = Shard.of(config.layer, rank=0, size=1)
        kind = TORCH_DTYPES[dtype]
        width = target.hidden_size
        with Checkpoint(folder) as checkpoint:
            layer = LayerWeights.read(checkpoint, LAYER_PREFIX, config.layer, shard, kind)
            norm_D = checkpoint.read(NORM, shape=(width,), dtype=kind)
            vocab_ids_V = _read_vocabulary(checkpoint, config, target.vocab_size)
            if config.kind != "shared":
                shape = (config.draft_vocab_size, width)
                lm_head_VD = checkpoint.read(HEAD, shape=shape, dtype=kind)
        if config.kind == "shared":
            with Checkpoint(target_path) as checkpoint:
                lm_head_VD = read_lm_head(checkpoint, target, rows=None, dtype=kind)
        return cls(config, layer, norm_D=norm_D, lm_head_VD=lm_head_VD, vocab_ids_V=vocab_ids_V)

    def training_forward(self, hidden_BLD: Tensor) -> Tensor:
        """Draft logits [B, L, V] of whole causal sequences of the target's hidden states."""
        x_BLD = hidden_BLD.to(self.norm_D.dtype)
        layer = self.layer.layer(plain_linear, SingleGroup(), dtype=x_BLD.dtype)
        windows = self.config.layer.sliding_windows
        mixed_BLD = forward_whole([layer], windows, x_BLD, self.rotation)
        norm = RmsNorm(self.norm_D, eps=self.config.layer.rms_norm_eps, dtype=x_BLD.dtype)
        normed_TD = norm(mixed_BLD.flatten(0, 1))
        logits_TV = functional.linear(normed_TD, self.lm_head_VD)
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


class ExitHead:
    """A head ready to draft, with pages of its own."""

    def __init__(
        self,
        *,
        exit_layer: int,
        vocab_ids: Tensor | None,
        layers: PagedLayers,
        logits_head: LogitsHead,
    ) -> None:
        self.exit_layer = exit_layer
        self.vocab_ids = vocab_ids
        """[V] target token of each draft index; None when the draft vocabulary is the target's."""
        self._layers = layers
        self._logits_head = logits_head

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        target: ModelSpec,
        target_path: Path,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        num_pages: int,
        page_size: int,
    ) -> Self:
        """Raises CheckpointError for a head that is damaged or does not fit the target."""
        head = TrainableExitHead.read(
            Path(folder), target=target, target_path=Path(target_path), dtype=dtype
        )
        return cls.ready(
            head,
            dtype=dtype,
            numerics=numerics,
            device=device,
            num_pages=num_pages,
            page_size=page_size,
        )

    @classmethod
    def ready(
        cls,
        head: TrainableExitHead,
        *,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        num_pages: int,
        page_size: int,
    ) -> Self:
        """Packs a head's present weights for drafting; later training does not reach them."""
        packer = LinearPacker(dtype=dtype, numerics=numerics, device=device)
        spec = head.config.layer
        weights = deepcopy(head.layer).requires_grad_(False).to(device, packer.weight_dtype)
        norm_D = head.norm_D.detach().clone().to(device, packer.weight_dtype)
        norm = RmsNorm(norm_D, eps=spec.rms_norm_eps, dtype=packer.compute_dtype)
        layers = PagedLayers(
            [weights.layer(packer.pack, SingleGroup(), dtype=packer.compute_dtype)],
            spec.sliding_windows,
            spec=spec,
            dtype=packer.compute_dtype,
            numerics=numerics,
            device=device,
            num_pages=num_pages,
            page_size=page_size,
        )
        return cls(
            exit_layer=head.exit_layer,
            vocab_ids=None if head.vocab_ids is None else head.vocab_ids.to(device),
            layers=layers,
            logits_head=LogitsHead(
                norm,
                packer.pack(head.lm_head_VD.detach().clone()),
                packer=packer,
                numerics=numerics,
            ),
        )

    def take_pages(self, other: "ExitHead") -> None:
        """Goes on with another head's keys and values, in place of empty ones."""
        self._layers.take_pages(other._layers)

    def forward(self, hidden_TD: Tensor, rows: RowPlan) -> Tensor:
        """Hidden states after `exit_layer` layers to the head's own; writes its keys and values."""
        return self._layers.forward(hidden_TD, rows)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Draft logits [T, V] float32 of hidden states that `forward` returned."""
        return self._logits_head(hidden_TD)


def _draft_vocabulary(kind: HeadKind, draft_vocab: Sequence[int] | None, vocab_size: int) -> Tensor:
    if kind != "truncated":
        if draft_vocab is not None:
            raise ConfigError(f"a draft vocabulary goes with head 'truncated', not {kind!r}")
        return torch.arange(vocab_size)
    chosen = sorted(set(draft_vocab or ()))
    if not chosen or chosen[0] < 0 or chosen[-1] >= vocab_size:
        raise ConfigError(
            f"a truncated head needs token ids from 0 to {vocab_size - 1}, found {chosen[:3]}..."
        )
    return torch.tensor(chosen)


def _read_vocabulary(checkpoint: Checkpoint, config: HeadConfig, vocab_size: int) -> Tensor:
    if config.kind != "truncated":
        return torch.arange(vocab_size)
    size = config.draft_vocab_size
    ids_V = checkpoint.read_raw("d2t", shape=(size,)).long() + torch.arange(size)
    is_drafted_W = checkpoint.read_raw("t2d", shape=(vocab_size,)).bool()
    if not torch.equal(is_drafted_W.nonzero().view(-1), ids_V):
        raise CheckpointError(
            file=checkpoint.folder / SINGLE_FILE,
            found="d2t and t2d that name different tokens",
            expected="the same draft vocabulary in both",
        )
    return ids_V
