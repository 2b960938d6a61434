"""Layers with their keys and values in pages: a pass over some rows, and whole sequences without.

Shared by spans and exit heads. Where the device has it, all layers of a pass are one call.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from eesd_dist.devices import backend_of
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention.whole import attend_whole
from eesd_dist.model.families.family import Scores
from eesd_dist.model.kernels import pad_rows
from eesd_dist.model.layers.layer import AfterLayer, DecoderLayer
from eesd_dist.model.rank_memory import kv_page_bytes
from eesd_dist.model.rope import rotation_tables
from eesd_dist.model.spec import ModelSpec


class FusedLayers(Protocol):
    """Layers with their pages in a device's own way: all of a pass together. One pass at a time."""

    def forward(
        self, hidden_TD: Tensor, rows: RowPlan, *, after_layer: AfterLayer | None = None
    ) -> Tensor:
        """Returns the rows [T, D]; writes their keys and values."""
        ...

    def store_kv(self, hidden_TD: Tensor, rows: RowPlan) -> None:
        """Writes the keys and values of rows [T, D], of one layer: no rank waits for another."""
        ...

    def take_pages(self, pages: Sequence[LayerPages]) -> None:
        """Reads and writes these pages from now on."""
        ...


class LayerStack(NamedTuple):
    """Consecutive layers with their pages."""

    layers: tuple[DecoderLayer, ...]
    pages: Sequence[LayerPages]
    rotations: tuple[Tensor, ...]
    """The table of each layer."""
    hidden_size: int
    dtype: torch.dtype
    """Type in which they compute."""


class LayersBackend(Protocol):
    """Part of a backend that layers use."""

    clears_pages: bool
    """True if layers may have run over rows that never arrived when a peer was lost: a mask does
    not remove NaN."""

    def fused_layers(self, stack: LayerStack) -> FusedLayers | None:
        """Returns the layers as one call, None where these products have none."""
        ...

    def settle(self, device: torch.device) -> None:
        """Waits until what this thread has written is visible to work of every thread."""
        ...


# Shapes: T rows, D hidden channels, B sequences, L their length, S positions, P pairs of channels.
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
        rotations: Sequence[Tensor],
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_pages: int,
        page_size: int,
    ) -> None:
        """`rotations`: the table of each layer."""
        self.device = device
        self.compute_dtype = dtype
        self.page_size = page_size
        self._layers = tuple(layers)
        self._rotations = tuple(rotations)
        self._pages = [
            LayerPages(
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=layer.num_kv_heads,
                queries_per_kv=layer.queries_per_kv,
                head_dim=spec.head_dim,
                dtype=kv_dtype,
                device=device,
                window=window,
                scores=spec.traits.scores,
            )
            for layer, window in zip(layers, windows, strict=True)
        ]
        self._windows = tuple(windows)
        self._scores = spec.traits.scores
        self._backend: LayersBackend = backend_of(device).model
        self.fused: FusedLayers | None = self._backend.fused_layers(
            LayerStack(self._layers, self._pages, self._rotations, spec.hidden_size, dtype)
        )
        """The layers as one call; None where there is none."""

    def forward(
        self,
        hidden_TD: Tensor,
        rows: RowPlan,
        *,
        after_layer: AfterLayer | None = None,
    ) -> Tensor:
        """`after_layer` is called with the number of layers done and the rows after them."""
        if self.fused is not None:
            return self.fused.forward(hidden_TD, rows, after_layer=after_layer)
        x_TD = pad_rows(hidden_TD.to(self.compute_dtype), rows.num_padded)
        turns = _rows_of(self._rotations, lambda table_SP: table_SP.index_select(0, rows.positions))
        for done, (layer, pages, turn_T1P) in enumerate(
            zip(self._layers, self._pages, turns, strict=True), start=1
        ):
            x_TD = layer.forward(x_TD, turn_T1P, partial(pages.attend, rows))
            if after_layer is not None:
                after_layer(done, x_TD.narrow(0, 0, rows.num_rows))
        return x_TD.narrow(0, 0, rows.num_rows)

    def store_kv(self, hidden_TD: Tensor, rows: RowPlan) -> None:
        """Writes the keys and values of rows [T, D] of the only layer."""
        if self.fused is not None:
            self.fused.store_kv(hidden_TD, rows)
        else:
            self.forward(hidden_TD, rows)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots in every layer, (from, to) each; reads all sources before it writes."""
        if not moves or not self._pages:
            return
        sources_M, targets_M = torch.tensor(moves, device=self.device).unbind(1)
        for pages in self._pages:
            pages.move(sources_M, targets_M)

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
        """Waits until pages written by this thread are visible to rounds of every thread."""
        self._backend.settle(self.device)

    @torch.inference_mode()
    def begin(self) -> None:
        """Starts an epoch, in which no page is valid yet."""
        if self._backend.clears_pages:
            for pages in self._pages:
                pages.clear()

    def take_pages(self, other: "PagedLayers") -> None:
        """Takes over the keys and values of layers of the same shape."""
        self._pages = other._pages
        if self.fused is not None:
            self.fused.take_pages(self._pages)

    def forward_full(self, hidden_BLD: Tensor) -> Tensor:
        return forward_whole(
            self._layers,
            self._windows,
            hidden_BLD.to(self.compute_dtype),
            self._rotations,
            scores=self._scores,
        )


def forward_whole(
    layers: Sequence[DecoderLayer],
    windows: Sequence[int | None],
    hidden_BLD: Tensor,
    rotations: Sequence[Tensor],
    *,
    scores: Scores,
) -> Tensor:
    """Computes whole causal sequences from position 0, without pages; supports autograd."""
    num_sequences, length, width = hidden_BLD.shape
    x_TD = hidden_BLD.reshape(-1, width)
    turns = _rows_of(rotations, lambda table_SP: table_SP[:length].repeat(num_sequences, 1))
    for layer, window, turn_T1P in zip(layers, windows, turns, strict=True):
        attend = partial(
            attend_whole,
            num_sequences=num_sequences,
            num_kv_heads=layer.num_kv_heads,
            window=window,
            scores=scores,
        )
        x_TD = layer.forward(x_TD, turn_T1P, attend)
    return x_TD.view(num_sequences, length, width)


def _rows_of(rotations: Sequence[Tensor], choose: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Returns the rows [T, 1, P] that `choose` takes from each layer's table, once a table."""
    rows = {id(table_SP): choose(table_SP).unsqueeze(1) for table_SP in _distinct(rotations)}
    return [rows[id(table_SP)] for table_SP in rotations]


def _distinct(tables: Sequence[Tensor]) -> Iterable[Tensor]:
    return {id(table): table for table in tables}.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLayers:
    """Layers in memory that have no pages yet."""

    layers: tuple[DecoderLayer, ...]
    windows: tuple[int | None, ...]
    spec: ModelSpec
    rotations: tuple[Tensor, ...]
    """The table of each layer."""
    num_ranks: int
    device: torch.device
    dtype: torch.dtype
    """Type in which they compute."""
    kv_dtype: torch.dtype
    """Type of stored keys and values."""

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        *,
        first: int,
        spec: ModelSpec,
        num_ranks: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """`first`: the number of the first one in the model."""
        own = slice(first, first + len(layers))
        return cls(
            layers=tuple(layers),
            windows=spec.sliding_windows[own],
            spec=spec,
            rotations=rotation_tables(
                spec.ropes[own], num_positions=spec.max_position_embeddings, device=device
            ),
            num_ranks=num_ranks,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )

    def kv_page_bytes(self, page_size: int) -> int:
        return kv_page_bytes(
            num_layers=len(self.layers),
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            page_size=page_size,
            num_ranks=self.num_ranks,
            bytes_per_value=self.kv_dtype.itemsize,
        )

    def with_pages(self, *, num_pages: int, page_size: int) -> PagedLayers:
        """Allocates the pages."""
        return PagedLayers(
            self.layers,
            self.windows,
            spec=self.spec,
            rotations=self.rotations,
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            num_pages=num_pages,
            page_size=page_size,
        )
