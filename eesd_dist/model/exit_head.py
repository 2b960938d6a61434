"""The exit head: one decoder layer, a norm and an LM head that guess from early hidden states.

`TrainableExitHead` holds the parameters (made from a target, trained, saved and read back);
`ExitHead` is a head ready to draft, or one tensor-parallel rank's part of one, with its own keys
and values. Both run the same layer. Neither decides how many tokens to draft.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.elementwise import soft_capped
from eesd_dist.model.head_config import HeadConfig, HeadIdentity, HeadKind
from eesd_dist.model.kernels import (
    TORCH_DTYPES,
    Linear,
    LinearPacker,
    pad_rows,
    padded_rows,
    plain_linear,
)
from eesd_dist.model.layer import LayerWeights
from eesd_dist.model.norms import RmsNorm
from eesd_dist.model.parallel import Shard, joined_over_ranks, part_of
from eesd_dist.model.rope import rotation_table
from eesd_dist.model.span import (
    FINAL_NORM,
    LoadedLayers,
    LogitsHead,
    PagedLayers,
    forward_whole,
    read_lm_head,
)
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import SINGLE_FILE, Checkpoint
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group_handles import SingleGroup

LAYER_PREFIX = "layers.0."
NORM = "norm.weight"
HEAD = "lm_head.weight"
EMBEDDING_PROJECTION = "embedding_proj.weight"


# Shapes: T rows, D hidden channels, V draft vocabulary, W target vocabulary, B sequences, L length,
# E a head's input channels: D, or 2 D with the token's embedding.
class EmbeddingFusion:
    """hidden + F . embedding / rms(embedding), with the embedding of the row's own token.

    After N layers the hidden state represents the row's token less directly. Conditioning a drafter
    on the sampled token's embedding: arXiv 2404.19124; EAGLE (arXiv 2401.15077) joins the two with
    one matrix. F starts at zero, so that the head starts equal to one without fusion.
    """

    def __init__(self, project: Linear, norm: RmsNorm) -> None:
        self._project = project
        self._norm = norm

    @classmethod
    def of(
        cls, project: Linear, layer: ModelSpec, *, dtype: torch.dtype, device: torch.device
    ) -> Self:
        ones_D = torch.ones(layer.hidden_size, device=device)
        return cls(project, RmsNorm(ones_D, eps=layer.rms_norm_eps, dtype=dtype))

    def __call__(self, hidden_TD: Tensor, embedding_TD: Tensor) -> Tensor:
        return hidden_TD + self._project(self._norm(embedding_TD))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """One rank's part of a head's weights: heads and channels of its layer, rows of its LM head.
    Norms and the embedding's projection are on every rank."""

    config: HeadConfig
    layer: LayerWeights
    norm_D: Tensor
    lm_head_VD: Tensor
    vocab_ids_V: Tensor
    """Covers the whole draft vocabulary on every rank."""
    embedding_DD: Tensor | None

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
        rows = part_of(config.draft_vocab_size, rank, size)
        width = target.hidden_size
        with Checkpoint(folder) as checkpoint:
            layer = LayerWeights.read(checkpoint, LAYER_PREFIX, config.layer, shard, dtype)
            norm_D = checkpoint.read(NORM, shape=(width,), dtype=dtype)
            vocab_ids_V = _read_vocabulary(checkpoint, config, target.vocab_size)
            if config.kind != "shared":
                shape = (config.draft_vocab_size, width)
                lm_head_VD = checkpoint.read(HEAD, shape=shape, rows=rows, dtype=dtype)
            embedding_DD = None
            if config.reads_embedding:
                square = (width, width)
                embedding_DD = checkpoint.read(EMBEDDING_PROJECTION, shape=square, dtype=dtype)
        if config.kind == "shared":
            with Checkpoint(target_path) as checkpoint:
                lm_head_VD = read_lm_head(checkpoint, target, rows=rows, dtype=dtype)
        return cls(
            config=config,
            layer=layer,
            norm_D=norm_D,
            lm_head_VD=lm_head_VD,
            vocab_ids_V=vocab_ids_V,
            embedding_DD=embedding_DD,
        )


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
        embedding_DD: Tensor | None = None,
    ) -> None:
        super().__init__()
        assert config.reads_embedding == (embedding_DD is not None)
        self.config = config
        self.layer = layer
        self.norm_D = nn.Parameter(norm_D)
        self.lm_head_VD = nn.Parameter(lm_head_VD, requires_grad=config.kind != "shared")
        self.embedding_DD = None if embedding_DD is None else nn.Parameter(embedding_DD)
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
    def reads_embedding(self) -> bool:
        return self.config.reads_embedding

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
        reads_embedding: bool = False,
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
            reads_embedding=reads_embedding,
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
            embedding_DD=torch.zeros(width, width, dtype=kind) if reads_embedding else None,
        )

    @classmethod
    def read(
        cls, folder: Path, *, target: ModelSpec, target_path: Path, dtype: DType = "float32"
    ) -> Self:
        """Raises CheckpointError for a head that is damaged or does not fit the target."""
        parts = _Parts.read(
            folder, target=target, target_path=target_path, dtype=TORCH_DTYPES[dtype]
        )
        return cls(
            parts.config,
            parts.layer,
            norm_D=parts.norm_D,
            lm_head_VD=parts.lm_head_VD,
            vocab_ids_V=parts.vocab_ids_V,
            embedding_DD=parts.embedding_DD,
        )

    def training_forward(self, hidden_BLD: Tensor, embedding_BLD: Tensor | None = None) -> Tensor:
        """Returns draft logits [B, L, V] of whole causal sequences of the target's hidden states.

        `embedding_BLD`: the target's embedding of the same tokens; needed if `reads_embedding`.
        """
        x_BLD = self._input(hidden_BLD.to(self.norm_D.dtype), embedding_BLD)
        layer = self.layer.layer(plain_linear, SingleGroup(), dtype=x_BLD.dtype)
        spec = self.config.layer
        windows = spec.sliding_windows
        scores = spec.traits.scores
        mixed_BLD = forward_whole([layer], windows, x_BLD, self.rotation, scores=scores)
        norm = RmsNorm.of(self.norm_D, spec, dtype=x_BLD.dtype)
        logits_TV = functional.linear(norm(mixed_BLD.flatten(0, 1)), self.lm_head_VD)
        if spec.traits.logit_softcap is not None:
            logits_TV = soft_capped(logits_TV, spec.traits.logit_softcap)
        return logits_TV.view(*hidden_BLD.shape[:2], -1)

    def _input(self, hidden_BLD: Tensor, embedding_BLD: Tensor | None) -> Tensor:
        if self.embedding_DD is None:
            return hidden_BLD
        if embedding_BLD is None:
            raise ConfigError(
                "this head reads the embedding of each row's token (reads_embedding), but only "
                "hidden states were passed: pass both to training_forward"
            )
        dtype = hidden_BLD.dtype
        fuse = EmbeddingFusion.of(
            plain_linear(self.embedding_DD, None),
            self.config.layer,
            dtype=dtype,
            device=hidden_BLD.device,
        )
        fused_TD = fuse(hidden_BLD.flatten(0, 1), embedding_BLD.to(dtype).flatten(0, 1))
        return fused_TD.view_as(hidden_BLD)

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
        if self.embedding_DD is not None:
            tensors[EMBEDDING_PROJECTION] = self.embedding_DD.detach()
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
    """A head ready to draft, with its own pages, or one rank's part of such a head. Every rank of
    the group calls `forward` and `logits` with the same rows, and gets the same logits."""

    def __init__(
        self,
        *,
        exit_layer: int,
        vocab_ids: Tensor | None,
        vocab_size: int,
        layers: PagedLayers,
        logits_head: LogitsHead,
        group: TensorGroup,
        fusion: EmbeddingFusion | None = None,
        identity: HeadIdentity | None = None,
    ) -> None:
        self.exit_layer = exit_layer
        self.identity = identity
        """The files the ranks have to agree on; None for a group of one rank."""
        self._vocab_size = vocab_size
        self._group = group
        self.vocab_ids = vocab_ids
        """[V] target token of each draft index; None when the draft vocabulary is the target's."""
        self._layers = layers
        self._logits_head = logits_head
        self._fusion = fusion

    @property
    def reads_embedding(self) -> bool:
        return self._fusion is not None

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
        group: TensorGroup | None = None,
    ) -> "ExitHead":
        """Loads the weights and allocates the pages; raises the errors of `HeadWeights.load`."""
        weights = HeadWeights.load(
            folder,
            target=target,
            target_path=target_path,
            dtype=dtype,
            numerics=numerics,
            device=device,
            group=group,
        )
        return weights.head(num_pages=num_pages, page_size=page_size)

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
    ) -> "ExitHead":
        """Packs a head's present weights for drafting; later training does not reach them."""
        embedding_DD = head.embedding_DD
        parts = _Parts(
            config=head.config,
            layer=deepcopy(head.layer),
            norm_D=head.norm_D.detach().clone(),
            lm_head_VD=head.lm_head_VD.detach().clone(),
            vocab_ids_V=head.draft_tokens,
            embedding_DD=None if embedding_DD is None else embedding_DD.detach().clone(),
        )
        weights = HeadWeights.of(
            parts,
            group=SingleGroup(),
            identity=None,
            dtype=dtype,
            numerics=numerics,
            device=device,
        )
        return weights.head(num_pages=num_pages, page_size=page_size)

    @property
    def paged(self) -> PagedLayers:
        """The head's layer with its pages, for copying pages."""
        return self._layers

    def take_pages(self, other: "ExitHead") -> None:
        """Replaces this head's empty keys and values by those of another head."""
        self._layers.take_pages(other._layers)

    def input_rows(self, hidden_TD: Tensor, embedding_TD: Tensor) -> Tensor:
        """Returns the input of `forward` [T, E]: hidden states after `exit_layer` layers and, if
        `reads_embedding`, the target's embedding of each row's token in further channels."""
        if self._fusion is None:
            return hidden_TD
        return torch.cat([hidden_TD, embedding_TD.to(hidden_TD.dtype)], dim=-1)

    def forward(self, input_TE: Tensor, rows: RowPlan) -> Tensor:
        """Computes the head's hidden states from `input_rows`; writes its keys and values."""
        if self._fusion is None:
            return self._layers.forward(input_TE, rows)
        hidden_TD, embedding_TD = input_TE.to(self._layers.compute_dtype).chunk(2, dim=-1)
        return self._layers.forward(self._fusion(hidden_TD, embedding_TD), rows)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots, (from, to) each; reads all sources before it writes any target."""
        self._layers.move(moves)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Returns draft logits [T, V] float32 of hidden states that `forward` returned."""
        mine_TV = self._logits_head(hidden_TD)
        return joined_over_ranks(mine_TV, self._group, count=self._vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """A head, or one rank's part of it, in memory and packed, without pages."""

    config: HeadConfig
    vocab_ids_V: Tensor
    layers: LoadedLayers
    logits_head: LogitsHead
    group: TensorGroup
    fusion: EmbeddingFusion | None
    identity: HeadIdentity | None

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
        group: TensorGroup | None = None,
    ) -> Self:
        """Reads this rank's part of a head; without a group, the whole head.

        Raises CheckpointError for a head that is damaged or does not fit the target, ConfigError
        for one that the group's ranks cannot share.
        """
        folder, group = Path(folder), group or SingleGroup()
        parts = _Parts.read(
            folder,
            target=target,
            target_path=Path(target_path),
            dtype=TORCH_DTYPES[dtype],
            rank=group.rank,
            size=group.size,
        )
        return cls.of(
            parts,
            group=group,
            identity=HeadIdentity.of(folder) if group.size > 1 else None,
            dtype=dtype,
            numerics=numerics,
            device=device,
        )

    @classmethod
    def of(
        cls,
        parts: "_Parts",
        *,
        group: TensorGroup,
        identity: HeadIdentity | None,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
    ) -> Self:
        """Packs the parts of a head."""
        packer = LinearPacker(dtype=dtype, numerics=numerics, device=device)
        config, spec = parts.config, parts.config.layer
        weights = parts.layer.requires_grad_(False).to(device, packer.weight_dtype)
        norm_D = parts.norm_D.to(device, packer.weight_dtype)
        norm = RmsNorm.of(norm_D, spec, dtype=packer.compute_dtype)
        layers = LoadedLayers.of(
            [weights.layer(packer.pack, group, dtype=packer.compute_dtype)],
            spec.sliding_windows,
            spec=spec,
            num_ranks=group.size,
            dtype=packer.compute_dtype,
            device=device,
        )
        fusion = None
        if parts.embedding_DD is not None:
            fusion = EmbeddingFusion.of(
                _padded(packer.pack(parts.embedding_DD), numerics),
                spec,
                dtype=packer.compute_dtype,
                device=device,
            )
        logits_head = LogitsHead(
            norm,
            packer.pack(parts.lm_head_VD),
            softcap=spec.traits.logit_softcap,
            packer=packer,
            numerics=numerics,
        )
        packer.report(f"exit_head after_layer={config.exit_layer}")
        return cls(
            config=config,
            vocab_ids_V=parts.vocab_ids_V.to(device),
            layers=layers,
            logits_head=logits_head,
            group=group,
            fusion=fusion,
            identity=identity,
        )

    def head(self, *, num_pages: int, page_size: int) -> ExitHead:
        """Allocates the pages. Raises ConfigError as `LoadedLayers.with_pages`."""
        return ExitHead(
            exit_layer=self.config.exit_layer,
            vocab_ids=self.vocab_ids_V if self.config.kind == "truncated" else None,
            vocab_size=self.config.draft_vocab_size,
            layers=self.layers.with_pages(num_pages=num_pages, page_size=page_size),
            logits_head=self.logits_head,
            group=self.group,
            fusion=self.fusion,
            identity=self.identity,
        )


def _padded(project: Linear, numerics: Numerics) -> Linear:
    """Pads the product's rows to a count that the self-check covers."""

    def multiply(x_TD: Tensor) -> Tensor:
        num_rows = x_TD.shape[0]
        padded = padded_rows(num_rows, numerics=numerics, device=x_TD.device)
        return project(pad_rows(x_TD, padded))[:num_rows]

    return multiply


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


def _read_vocabulary(checkpoint: Checkpoint, config: HeadConfig, vocab_size: int) -> Tensor:
    if config.kind != "truncated":
        return torch.arange(vocab_size)
    size = config.draft_vocab_size
    ids_V = checkpoint.read_raw("d2t", shape=(size,)).long() + torch.arange(size)
    is_drafted_W = checkpoint.read_raw("t2d", shape=(vocab_size,)).bool()
    if not torch.equal(is_drafted_W.nonzero().view(-1), ids_V):
        raise CheckpointError(
            file=checkpoint.folder / SINGLE_FILE,
            found="d2t and t2d with different tokens",
            expected="the same draft vocabulary in both",
        )
    return ids_V
