"""Spans: consecutive layers of a target with their keys and values.

The draft stage is [0, N), the verify stage [N, L), plain decoding [0, L): the same code with
different bounds. A span computes the given rows over the given pages. It never tracks gradients;
call it within `torch.inference_mode()` to save their bookkeeping.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.compiled import can_compile
from eesd_dist.config import DType, Numerics
from eesd_dist.errors import ConfigError
from eesd_dist.model.attention.pages import LayerPages, kv_dtype
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention.whole import attend_whole
from eesd_dist.model.elementwise import soft_capped_rows
from eesd_dist.model.families.family import Scores
from eesd_dist.model.kernels import Linear, LinearPacker, pad_rows, padded_rows
from eesd_dist.model.layer import DecoderLayer, LayerWeights
from eesd_dist.model.loading import OnProgress, Piece, load_pieces, unwatched
from eesd_dist.model.norms import RmsNorm
from eesd_dist.model.parallel import Shard
from eesd_dist.model.rank_memory import kv_page_bytes
from eesd_dist.model.rope import rotation_table
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import TensorSource, weights_digest
from eesd_dist.transport.contracts import TensorGroup

if TYPE_CHECKING:
    from eesd_dist.model.compiled_layers import CompiledLayers

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


# Shapes: T rows, D hidden channels, V vocabulary (shard), B sequences, L their length, S positions,
# P pairs of channels.
class LayerRows:
    """Keeps copies of a round's rows after some of the model's layers."""

    def __init__(self, exits: Collection[int]) -> None:
        self._exits = frozenset(exits)
        self.rows: dict[int, Tensor] = {}
        """Number of layers, from the model's first on -> [T, D]."""

    def take(self, num_layers: int, hidden_TD: Tensor) -> None:
        if num_layers in self._exits:
            self.rows[num_layers] = hidden_TD.clone()


class PagedLayers:
    """Layers ready to run, each with its pages; shared by spans and exit heads."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        windows: Sequence[int | None],
        *,
        spec: ModelSpec,
        rotation_SP: Tensor,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
    ) -> None:
        device = rotation_SP.device
        self.compute_dtype = dtype
        self._layers = tuple(layers)
        self._rotation_SP = rotation_SP
        self._pages = [
            LayerPages(
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=layer.num_kv_heads,
                queries_per_kv=layer.queries_per_kv,
                head_dim=spec.head_dim,
                dtype=dtype,
                device=device,
                window=window,
                scores=spec.traits.scores,
            )
            for layer, window in zip(layers, windows, strict=True)
        ]
        self._windows = tuple(windows)
        self._scores = spec.traits.scores
        self._compiled = compiled_layers(self._layers, self._pages, rotation_SP)

    def forward(
        self,
        hidden_TD: Tensor,
        rows: RowPlan,
        *,
        after_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """`after_layer` is called with the number of layers done and the rows after them."""
        if self._compiled is not None:
            return self._compiled.forward(hidden_TD, rows, after_layer=after_layer)
        x_TD = pad_rows(hidden_TD.to(self.compute_dtype), rows.num_padded)
        rotation_T1P = self._rotation_SP.index_select(0, rows.positions).unsqueeze(1)
        for done, (layer, pages) in enumerate(zip(self._layers, self._pages, strict=True), start=1):
            x_TD = layer.forward(x_TD, rotation_T1P, partial(pages.attend, rows))
            if after_layer is not None:
                after_layer(done, x_TD.narrow(0, 0, rows.num_rows))
        return x_TD.narrow(0, 0, rows.num_rows)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots in every layer, (from, to) each; reads all sources before it writes."""
        if not moves or not self._pages:
            return
        sources_M, targets_M = torch.tensor(moves, device=self._rotation_SP.device).unbind(1)
        for pages in self._pages:
            pages.move(sources_M, targets_M)

    @property
    def device(self) -> torch.device:
        return self._rotation_SP.device

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page, layer by layer."""
        return tuple(pages.page_bytes for pages in self._pages)

    def read_pages(self, layer: int, pages: Sequence[int]) -> Tensor:
        """Returns a copy of these pages of a layer, as bytes on their device."""
        return self._pages[layer].read(pages)

    def write_pages(self, layer: int, pages: Sequence[int], content_B: Tensor) -> None:
        """Writes bytes from `read_pages` to pages that are in no request's table."""
        self._pages[layer].write(pages, content_B)

    def settle_writes(self) -> None:
        """Waits until pages written by this thread are visible to rounds of every thread. On a CPU
        they are at once; on a GPU rounds may run on another stream than the writer's."""
        if self._rotation_SP.is_cuda:
            torch.cuda.current_stream(self._rotation_SP.device).synchronize()

    @torch.inference_mode()
    def begin(self) -> None:
        """Starts an epoch, in which no page is valid yet. On a GPU, layers that were queued when a
        peer was lost ran over rows that never arrived, and a mask does not remove NaN. On a CPU
        nothing is computed before its rows are there, and clearing would touch all memory."""
        if self._rotation_SP.is_cuda:
            for pages in self._pages:
                pages.clear()

    def take_pages(self, other: "PagedLayers") -> None:
        """Takes over the keys and values of layers of the same shape."""
        self._pages = other._pages
        if self._compiled is not None:
            self._compiled.take_pages(self._pages)

    def forward_full(self, hidden_BLD: Tensor) -> Tensor:
        return forward_whole(
            self._layers,
            self._windows,
            hidden_BLD.to(self.compute_dtype),
            self._rotation_SP,
            scores=self._scores,
        )


def compiled_layers(
    layers: Sequence[DecoderLayer], pages: Sequence[LayerPages], rotation_SP: Tensor
) -> "CompiledLayers | None":
    """Returns the layers as one compiled call, where this machine and these products have it."""
    if rotation_SP.device.type != "cpu" or not can_compile():
        return None
    from eesd_dist.model.compiled_layers import CompiledLayers

    return CompiledLayers.of(layers, pages, rotation_SP)


def forward_whole(
    layers: Sequence[DecoderLayer],
    windows: Sequence[int | None],
    hidden_BLD: Tensor,
    rotation_SP: Tensor,
    *,
    scores: Scores,
) -> Tensor:
    """Computes whole causal sequences from position 0, without pages; supports autograd."""
    num_sequences, length, width = hidden_BLD.shape
    x_TD = hidden_BLD.reshape(-1, width)
    rotation_T1P = rotation_SP[:length].repeat(num_sequences, 1).unsqueeze(1)
    for layer, window in zip(layers, windows, strict=True):
        attend = partial(
            attend_whole,
            num_sequences=num_sequences,
            num_kv_heads=layer.num_kv_heads,
            window=window,
            scores=scores,
        )
        x_TD = layer.forward(x_TD, rotation_T1P, attend)
    return x_TD.view(num_sequences, length, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLayers:
    """Layers in memory that have no pages yet."""

    layers: tuple[DecoderLayer, ...]
    windows: tuple[int | None, ...]
    spec: ModelSpec
    rotation_SP: Tensor
    num_ranks: int
    dtype: torch.dtype
    """In which they compute."""

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        windows: Sequence[int | None],
        *,
        spec: ModelSpec,
        num_ranks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        return cls(
            layers=tuple(layers),
            windows=tuple(windows),
            spec=spec,
            rotation_SP=rotation_table(
                spec.rope, num_positions=spec.max_position_embeddings, device=device
            ),
            num_ranks=num_ranks,
            dtype=dtype,
        )

    @property
    def device(self) -> torch.device:
        return self.rotation_SP.device

    @property
    def bytes_per_kv(self) -> int:
        """Bytes of one number of a key or a value."""
        return kv_dtype(self.dtype, self.device).itemsize

    def kv_page_bytes(self, page_size: int) -> int:
        return kv_page_bytes(
            num_layers=len(self.layers),
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            page_size=page_size,
            num_ranks=self.num_ranks,
            bytes_per_value=self.bytes_per_kv,
        )

    def with_pages(self, *, num_pages: int, page_size: int) -> PagedLayers:
        """Allocates the pages."""
        return PagedLayers(
            self.layers,
            self.windows,
            spec=self.spec,
            rotation_SP=self.rotation_SP,
            dtype=self.dtype,
            num_pages=num_pages,
            page_size=page_size,
        )


class LogitsHead:
    """Final norm and LM head over any number of rows, padded as the product needs."""

    def __init__(
        self,
        norm: RmsNorm,
        linear: Linear,
        *,
        softcap: float | None,
        packer: LinearPacker,
        numerics: Numerics,
    ) -> None:
        self._norm = norm
        self._linear = linear
        self._softcap = softcap
        self._compute_dtype = packer.compute_dtype
        self._numerics: Numerics = numerics
        self._compiled = _compiled_head(norm, linear)

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """Returns logits [T, V] float32; any number of leading axes."""
        is_flat = hidden_TD.dim() == 2
        rows_TD = hidden_TD if is_flat else hidden_TD.reshape(-1, hidden_TD.shape[-1])
        logits_TV = self._after_norm(rows_TD.to(self._compute_dtype))
        if self._softcap is not None:
            logits_TV = soft_capped_rows(logits_TV, self._softcap)
        if is_flat:
            return logits_TV
        return logits_TV.reshape(*hidden_TD.shape[:-1], logits_TV.shape[-1])

    def _after_norm(self, rows_TD: Tensor) -> Tensor:
        if self._compiled is not None:
            return self._compiled(rows_TD)
        num_rows = rows_TD.shape[0]
        padded = padded_rows(num_rows, numerics=self._numerics, device=rows_TD.device)
        return self._linear(self._norm(pad_rows(rows_TD, padded)))[:num_rows].float()


def _compiled_head(norm: RmsNorm, linear: Linear) -> Linear | None:
    """Returns norm and product as one compiled call, if the product is compiled."""
    if not can_compile():
        return None
    from eesd_dist.model.cpu.packed import PackedProduct, padded_vector

    if not isinstance(linear, PackedProduct):
        return None
    weight_D = padded_vector(norm.scaled_weight_D)
    linear.after_norm(torch.zeros(1, linear.num_in), weight_D, norm.floor)  # compiles
    return lambda x_TD: linear.after_norm(x_TD, weight_D, norm.floor)


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

    def forward(self, hidden_TD: Tensor, rows: RowPlan, *, kept: LayerRows | None = None) -> Tensor:
        """Computes the rows of one round; writes their keys and values."""
        if kept is None:
            return self._layers.forward(hidden_TD, rows)
        return self._layers.forward(
            hidden_TD,
            rows,
            after_layer=lambda done, x_TD: kept.take(self.first + done, x_TD),
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
        on_progress: OnProgress = unwatched,
    ) -> Self:
        """Reads only what this rank and span need, a layer at a time.

        Raises CheckpointError for a folder that does not fit, ConfigError if this machine cannot
        compute with the configured numerics.
        """
        if not 0 <= first <= last <= spec.num_layers:
            raise ConfigError(f"layers [{first}, {last}) of a model with {spec.num_layers} layers")
        shard = Shard.of(spec, rank=group.rank, size=group.size)
        packer = LinearPacker(dtype=dtype, numerics=numerics, device=device)
        layers: list[DecoderLayer] = []
        embeddings: list[Tensor] = []
        heads: list[LogitsHead] = []
        pieces: list[Piece[Any]] = [
            _layer_piece(at, layers, spec, shard, packer, group, device)
            for at in range(first, last)
        ]
        if first == 0:
            pieces.append(_embedding_piece(embeddings, spec, packer, device))
        if last == spec.num_layers:
            pieces.append(_head_piece(heads, spec, shard, packer, numerics, device))
        digest = weights_digest(Path(path))
        load_pieces(Path(path), pieces, on_progress=on_progress)
        packer.report(f"layers=[{first},{last})")
        return cls(
            spec=spec,
            first=first,
            last=last,
            shard=shard,
            group=group,
            layers=LoadedLayers.of(
                layers,
                spec.sliding_windows[first:last],
                spec=spec,
                num_ranks=group.size,
                dtype=packer.compute_dtype,
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


def _layer_piece(
    at: int,
    layers: list[DecoderLayer],
    spec: ModelSpec,
    shard: Shard,
    packer: LinearPacker,
    group: TensorGroup,
    device: torch.device,
) -> Piece[LayerWeights]:
    def read(source: TensorSource) -> LayerWeights:
        return LayerWeights.read(source, f"model.layers.{at}.", spec, shard, packer.weight_dtype)

    def pack(weights: LayerWeights) -> None:
        weights.requires_grad_(False).to(device)
        layers.append(weights.layer(packer.pack, group, dtype=packer.compute_dtype))

    return Piece(name=f"layer {at}", read=read, pack=pack)


def _embedding_piece(
    embeddings: list[Tensor], spec: ModelSpec, packer: LinearPacker, device: torch.device
) -> Piece[Tensor]:
    def read(source: TensorSource) -> Tensor:
        return read_embedding(source, spec, dtype=packer.weight_dtype)

    def pack(embedding_VD: Tensor) -> None:
        embeddings.append(embedding_VD.to(device))

    return Piece(name="embedding", read=read, pack=pack)


def read_embedding(source: TensorSource, spec: ModelSpec, *, dtype: torch.dtype) -> Tensor:
    """Returns the target's embedding, scaled in its stored type if the family scales it."""
    shape, scale = (spec.vocab_size, spec.hidden_size), spec.traits.embedding_scale
    embedding_VD = source.read(EMBEDDING, shape=shape, dtype=dtype)
    return embedding_VD if scale == 1.0 else embedding_VD * torch.tensor(scale, dtype=dtype)


def read_lm_head(
    source: TensorSource, spec: ModelSpec, *, rows: range | None, dtype: torch.dtype
) -> Tensor:
    """Returns the target's LM head (or the embedding tied to it), or `rows` of it."""
    name = EMBEDDING if spec.tie_word_embeddings else LM_HEAD
    return source.read(name, shape=(spec.vocab_size, spec.hidden_size), rows=rows, dtype=dtype)


def _head_piece(
    heads: list[LogitsHead],
    spec: ModelSpec,
    shard: Shard,
    packer: LinearPacker,
    numerics: Numerics,
    device: torch.device,
) -> Piece[tuple[Tensor, Tensor]]:
    def read(source: TensorSource) -> tuple[Tensor, Tensor]:
        dtype = packer.weight_dtype
        norm_D = source.read(FINAL_NORM, shape=(spec.hidden_size,), dtype=dtype)
        return norm_D, read_lm_head(source, spec, rows=shard.vocabulary, dtype=dtype)

    def pack(content: tuple[Tensor, Tensor]) -> None:
        norm_D, weight_VD = content
        head = LogitsHead(
            RmsNorm.of(norm_D.to(device), spec, dtype=packer.compute_dtype),
            packer.pack(weight_VD),
            softcap=spec.traits.logit_softcap,
            packer=packer,
            numerics=numerics,
        )
        heads.append(head)

    return Piece(name="LM head", read=read, pack=pack)
