"""Spans: consecutive layers of a target with their keys and values.

The draft stage is [0, N), the verify stage [N, L), plain decoding [0, L): the same code with
different bounds. A span computes the given rows over the given pages. It never tracks gradients;
call it within `torch.inference_mode()` to save their bookkeeping.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.config import DType, KvCacheDType, Numerics
from eesd_dist.errors import ConfigError
from eesd_dist.model.attention.pages import pages_on
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.kernels import LinearPacker
from eesd_dist.model.layers.layer import DecoderLayer, LayerWeights
from eesd_dist.model.layers.logits_head import LogitsHead
from eesd_dist.model.layers.norms import RmsNorm
from eesd_dist.model.layers.paged_layers import LayerRows, LoadedLayers, PagedLayers
from eesd_dist.model.loading import LoadUnit, OnProgress, load_units, unwatched
from eesd_dist.model.parallel import Shard
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import (
    Checkpoint,
    Shapes,
    TensorSource,
    warn_of_unused,
    weights_digest,
)
from eesd_dist.transport.contracts import TensorGroup

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
_COMPARED_ROWS = 4096
"""Rows of two matrices that are compared at a time."""


# Shapes: T rows, D hidden channels, V vocabulary (shard), B sequences, L their length.
class LlamaSpan:
    """Layers [first, last) of a target on one rank of its group, with pages."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        first: int,
        last: int,
        shard: Shard,
        layers: PagedLayers,
        embedding_VD: Tensor | None,
        head: LogitsHead | None,
        weights: str,
    ) -> None:
        self.spec = spec
        self.weights = weights
        """Digest of samples of the checkpoint's files, taken when they were read."""
        self.first = first
        self.last = last
        self.compute_dtype = layers.compute_dtype
        """Type of hidden states in and out."""
        self.num_ranks = shard.size
        self.vocab_start = shard.vocabulary.start
        self.vocab_size_local = len(shard.vocabulary)
        self._layers = layers
        self._embedding_VD = embedding_VD
        self._head = head

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        first: int,
        last: int,
        *,
        group: TensorGroup,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        num_pages: int,
        page_size: int,
        kv_cache_dtype: KvCacheDType = "auto",
        on_progress: OnProgress = unwatched,
    ) -> "LlamaSpan":
        """Loads the weights and allocates the pages; raises the errors of `SpanWeights.load`."""
        weights = SpanWeights.load(
            path,
            spec,
            first,
            last,
            group=group,
            dtype=dtype,
            numerics=numerics,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            on_progress=on_progress,
        )
        return weights.span(num_pages=num_pages, page_size=page_size)

    @property
    def paged(self) -> PagedLayers:
        """The layers with their pages, for copying pages."""
        return self._layers

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Embeds token ids of any shape; only for a span that starts at layer 0."""
        if self._embedding_VD is None:
            raise ConfigError(f"a span that starts at layer {self.first} has no embedding")
        return functional.embedding(tokens_T, self._embedding_VD).to(self.compute_dtype)

    @property
    def embedding(self) -> Tensor | None:
        """[V, D] in the type of the weights; None for a span that does not start at layer 0."""
        return self._embedding_VD

    @property
    def logits_head(self) -> LogitsHead | None:
        """None for a span that does not end with the last layer."""
        return self._head

    def forward(
        self, hidden_TD: Tensor, rows: RowPlan, *, layer_rows: LayerRows | None = None
    ) -> Tensor:
        """Computes the rows of one round; writes their keys and values."""
        if layer_rows is None:
            return self._layers.forward(hidden_TD, rows)
        return self._layers.forward(
            hidden_TD,
            rows,
            after_layer=lambda done, x_TD: layer_rows.take(self.first + done, x_TD),
        )

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots, (from, to) each; reads all sources before it writes any target."""
        self._layers.move(moves)

    def forward_full(self, hidden_BLD: Tensor) -> Tensor:
        """Computes whole causal sequences from position 0, without reading or writing pages."""
        return self._layers.forward_full(hidden_BLD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Returns float32 logits of this rank's part of the vocabulary: `vocab_size_local` tokens
        from `vocab_start` on."""
        if self._head is None:
            raise ConfigError(
                f"a span that ends at layer {self.last} of {self.spec.num_layers} has no LM head"
            )
        return self._head(hidden_TD)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanWeights:
    """The weights of a span in memory, without pages: their number follows from what is left."""

    spec: ModelSpec
    first: int
    last: int
    shard: Shard
    group: TensorGroup
    layers: LoadedLayers
    embedding_VD: Tensor | None
    head: LogitsHead | None
    digest: str
    """Digest of samples of the checkpoint's files, taken when they were read."""
    products: str
    """Name of the products that decide the last bits; empty for `numerics: fast`."""

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        first: int,
        last: int,
        *,
        group: TensorGroup,
        dtype: DType,
        numerics: Numerics,
        device: torch.device,
        kv_cache_dtype: KvCacheDType = "auto",
        on_progress: OnProgress = unwatched,
    ) -> Self:
        """Reads only what this rank and span need, a layer at a time.

        Raises CheckpointError for a folder that does not fit, ConfigError if this machine cannot
        compute with the configured numerics, or store keys and values of this type.
        """
        if not 0 <= first <= last <= spec.num_layers:
            raise ConfigError(f"layers [{first}, {last}) of a model with {spec.num_layers} layers")
        shard = Shard.of(spec, rank=group.rank, size=group.size)
        packer = LinearPacker(dtype=dtype, numerics=numerics, device=device)
        kv_dtype = pages_on(device).kv_dtype(kv_cache_dtype, compute_dtype=packer.compute_dtype)
        layers: list[DecoderLayer] = []
        embeddings: list[Tensor] = []
        heads: list[LogitsHead] = []
        units: list[LoadUnit[Any]] = [
            _layer_unit(at, layers, spec, shard, packer, group, device) for at in range(first, last)
        ]
        if first == 0:
            units.append(_embedding_unit(embeddings, spec, packer, device))
        if last == spec.num_layers:
            units.append(_head_unit(heads, spec, shard, packer, numerics, device))
        digest = weights_digest(Path(path))
        load_units(Path(path), units, on_progress=on_progress)
        if last == spec.num_layers and group.rank == 0:
            _report_stored(Path(path), spec)
        packer.report(f"layers=[{first},{last})")
        return cls(
            spec=spec,
            first=first,
            last=last,
            shard=shard,
            group=group,
            layers=LoadedLayers.of(
                layers,
                first=first,
                spec=spec,
                num_ranks=group.size,
                dtype=packer.compute_dtype,
                kv_dtype=kv_dtype,
                device=device,
            ),
            embedding_VD=embeddings[0] if embeddings else None,
            head=heads[0] if heads else None,
            digest=digest,
            products=packer.products,
        )

    def span(self, *, num_pages: int, page_size: int) -> LlamaSpan:
        """Allocates the pages. Raises ConfigError as `LoadedLayers.with_pages`."""
        return LlamaSpan(
            spec=self.spec,
            first=self.first,
            last=self.last,
            shard=self.shard,
            layers=self.layers.with_pages(num_pages=num_pages, page_size=page_size),
            embedding_VD=self.embedding_VD,
            head=self.head,
            weights=self.digest,
        )


def _layer_unit(
    at: int,
    layers: list[DecoderLayer],
    spec: ModelSpec,
    shard: Shard,
    packer: LinearPacker,
    group: TensorGroup,
    device: torch.device,
) -> LoadUnit[LayerWeights]:
    def read(source: TensorSource) -> LayerWeights:
        return LayerWeights.read(source, f"model.layers.{at}.", spec, shard, packer.weight_dtype)

    def pack(weights: LayerWeights) -> None:
        weights.requires_grad_(False).to(device)
        layers.append(weights.layer(packer.pack, group, dtype=packer.compute_dtype))

    return LoadUnit(name=f"layer {at}", read=read, pack=pack)


def _embedding_unit(
    embeddings: list[Tensor], spec: ModelSpec, packer: LinearPacker, device: torch.device
) -> LoadUnit[Tensor]:
    def read(source: TensorSource) -> Tensor:
        return read_embedding(source, spec, dtype=packer.weight_dtype)

    def pack(embedding_VD: Tensor) -> None:
        embeddings.append(embedding_VD.to(device))

    return LoadUnit(name="embedding", read=read, pack=pack)


def read_embedding(source: TensorSource, spec: ModelSpec, *, dtype: torch.dtype) -> Tensor:
    """Returns the target's embedding, scaled in its stored type if the family scales it."""
    shape, scale = (spec.vocab_size, spec.hidden_size), spec.traits.embedding_scale
    is_lm_head = spec.tie_word_embeddings and EMBEDDING not in source
    embedding_VD = source.read(LM_HEAD if is_lm_head else EMBEDDING, shape=shape, dtype=dtype)
    return embedding_VD if scale == 1.0 else embedding_VD * torch.tensor(scale, dtype=dtype)


def read_lm_head(
    source: TensorSource, spec: ModelSpec, *, rows: range | None, dtype: torch.dtype
) -> Tensor:
    """Returns the target's LM head, or `rows` of it. As in transformers, one that is stored is read
    also if config.json ties it to the embedding."""
    name = EMBEDDING if spec.tie_word_embeddings and LM_HEAD not in source else LM_HEAD
    return source.read(name, shape=(spec.vocab_size, spec.hidden_size), rows=rows, dtype=dtype)


def _report_stored(path: Path, spec: ModelSpec) -> None:
    """Logs stored tensors that the model does not use, and an LM head that differs from the
    embedding to which config.json ties it."""
    dtype, shard = torch.float32, Shard.of(spec, rank=0, size=1)
    with Checkpoint(path) as checkpoint:
        shapes = Shapes(checkpoint.names)
        for at in range(spec.num_layers):
            LayerWeights.read(shapes, f"model.layers.{at}.", spec, shard, dtype)
        read_embedding(shapes, spec, dtype=dtype)
        read_lm_head(shapes, spec, rows=None, dtype=dtype)
        warn_of_unused(checkpoint, shapes.of.keys() | {FINAL_NORM})
        if spec.tie_word_embeddings and {EMBEDDING, LM_HEAD} <= checkpoint.names:
            shape = (spec.vocab_size, spec.hidden_size)
            embedding_VD, head_VD = (
                torch.split(checkpoint.read_raw(name, shape=shape), _COMPARED_ROWS)
                for name in (EMBEDDING, LM_HEAD)
            )
            pairs = zip(embedding_VD, head_VD, strict=True)
            if not all(bool((rows == other).all()) for rows, other in pairs):
                logger.warning(
                    "the stored %s is used: folder=%s: it differs from %s, and config.json has "
                    "tie_word_embeddings = true",
                    LM_HEAD, path, EMBEDDING,
                )  # fmt: skip


def _head_unit(
    heads: list[LogitsHead],
    spec: ModelSpec,
    shard: Shard,
    packer: LinearPacker,
    numerics: Numerics,
    device: torch.device,
) -> LoadUnit[tuple[Tensor, Tensor]]:
    def read(source: TensorSource) -> tuple[Tensor, Tensor]:
        dtype = packer.weight_dtype
        norm_D = source.read(FINAL_NORM, shape=(spec.hidden_size,), dtype=dtype)
        return norm_D, read_lm_head(source, spec, rows=shard.vocabulary, dtype=dtype)

    def pack(content: tuple[Tensor, Tensor]) -> None:
        norm_D, weight_VD = content
        head = LogitsHead(
            RmsNorm.before_logits(norm_D.to(device), spec, dtype=packer.compute_dtype),
            packer.pack(weight_VD),
            softcap=spec.traits.logit_softcap,
            packer=packer,
            numerics=numerics,
        )
        heads.append(head)

    return LoadUnit(name="LM head", read=read, pack=pack)
