"""Layers on a GPU: their kernels in the order of `DecoderLayer.forward`, kept as CUDA graphs.

Launching a layer's kernels one by one takes the host longer than the GPU needs to run them. A graph
replays the launches of a pass with a fixed number of rows and fixed addresses: rows and plan are
copied into buffers, and the rest of the rows is padding. Rows do not depend on each other, so that
a row has the same bits with and without a graph.

Ranks of a group have graphs, too, in pieces where their sums cannot be in them (`graphs`). Sizes
and padding follow from what every rank has, so that a rank which cannot capture launches kernels
that match its peers' graphs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_dist.backends.cuda.attention import CudaAttention
from eesd_dist.backends.cuda.graphs import Graphs
from eesd_dist.backends.cuda.rows import activated, normed
from eesd_dist.backends.cuda.tiles import DeviceRows, RowTiles, Tiling, packed_rows, single_tiles
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.elementwise import SILU
from eesd_dist.model.kv_layout import RowArrays
from eesd_dist.model.layers.layer import AfterLayer, DecoderLayer
from eesd_dist.model.layers.norms import JointNorm, RmsNorm
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group_handles import process_group_of

GRAPH_ROWS = (8, 16, *range(64, 641, 64))
"""Numbers of rows that have a graph: up to the drafts of a large batch. Longer passes take the GPU
longer than the host. None between 16 and 64: on an H200 a pass of 32 rows takes longer than one of
64, which fill the tiles of its products."""
GRAPH_TILES = (8, 16, 32, *range(64, 641, 64))
"""Numbers of attention tiles that have a graph."""


# Shapes: T rows, D hidden channels, S positions, C channels of a head, as pairs of numbers.
class CudaLayers:
    """Layers with their pages. One pass at a time: graphs share their memory."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        pages: Sequence[LayerPages],
        rotations: Sequence[Tensor],
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`rotations`: the table of each layer."""
        self._layers = tuple(layers)
        # Views of the tables, which layers share.
        self._rotations = [torch.view_as_real(table_SP).flatten(1) for table_SP in rotations]
        self.group: TensorGroup = layers[0].output.group
        """The ranks that have these layers together."""
        device = rotations[0].device
        self._graphs: Graphs[tuple[int, Tiling], Tensor] = Graphs(
            device, name="layers", group=self.group
        )
        self._rows_TD = torch.zeros(GRAPH_ROWS[-1], hidden_size, dtype=dtype, device=device)
        self.take_pages(pages)

    def take_pages(self, pages: Sequence[LayerPages]) -> None:
        """Reads and writes these pages from now on."""
        self._attention = [_on_gpu(layer_pages) for layer_pages in pages]
        self._graphs.clear()
        # Layers with a window have kernels of their own. Compared while weights are loaded, not in
        # a round.
        self._may_tile = all(attention.is_independent for attention in self._attention)

    @torch.inference_mode()
    def forward(
        self, hidden_TD: Tensor, rows: RowPlan, *, after_layer: AfterLayer | None = None
    ) -> Tensor:
        """`after_layer` is called with the number of layers done and the rows after them."""
        num_rows = rows.num_rows
        tiles = self.tiles(rows.arrays)
        if not self.has_graphs(num_rows):
            device_rows = self._attention[0].placed(rows.arrays, num_padded=num_rows, tiles=tiles)
            return self.run(hidden_TD.to(self._rows_TD.dtype, copy=True), device_rows, after_layer)
        num_padded = next(count for count in GRAPH_ROWS if count >= num_rows)
        self._graphs.upload(packed_rows(rows.arrays, tiles, num_padded))
        self._rows_TD.narrow(0, 0, num_rows).copy_(hidden_TD)
        device_rows = DeviceRows(self._graphs.numbers, num_padded, tiles.tiling)
        x_TD = self._rows_TD.narrow(0, 0, num_padded)
        if after_layer is not None:  # padded, too: this rank's peers may not be asked
            out_TD = self.run(
                x_TD.clone(),
                device_rows,
                lambda done, rows_TD: after_layer(done, rows_TD.narrow(0, 0, num_rows)),
            )
            return out_TD.narrow(0, 0, num_rows)
        out_TD = self._graphs.run(
            (num_padded, tiles.tiling), lambda: self.run(x_TD.clone(), device_rows)
        )
        return out_TD.narrow(0, 0, num_rows).clone()

    @torch.inference_mode()
    def store_kv(self, hidden_TD: Tensor, rows: RowPlan) -> None:
        """Writes the keys and values of rows [T, D], of one layer: no rank waits for another."""
        (layer,), (attention,), (rotation_SC,) = self._layers, self._attention, self._rotations
        x_TD = hidden_TD.to(self._rows_TD.dtype, copy=True)
        input_TD = _add_and_norm(layer.attention_norm, x_TD, None)
        device_rows = attention.placed(rows.arrays, num_padded=rows.num_rows)
        _stored_heads(layer, attention, rotation_SC, input_TD, device_rows)

    def has_graphs(self, num_rows: int) -> bool:
        """Returns whether a pass of so many rows is padded, and a graph where there is room. The
        same on every rank."""
        if num_rows > GRAPH_ROWS[-1]:
            return False
        group = process_group_of(self.group)
        return self.group.size == 1 if group is None else group.queues_transfers

    def tiles(self, arrays: RowArrays) -> RowTiles:
        """Returns the tiles of these rows, as many as there are graphs for; tiles of a row where
        one layer needs them."""
        if not self._may_tile:
            return single_tiles(arrays, counts=GRAPH_TILES)
        return self._attention[0].tiles(arrays, counts=GRAPH_TILES)

    def run(self, x_TD: Tensor, rows: DeviceRows, after_layer: AfterLayer | None = None) -> Tensor:
        """Launches the kernels one by one; overwrites x."""
        addend_TD: Tensor | None = None
        for done, (layer, attention, rotation_SC) in enumerate(
            zip(self._layers, self._attention, self._rotations, strict=True), start=1
        ):
            input_TD = _add_and_norm(layer.attention_norm, x_TD, addend_TD)
            heads_THE = _stored_heads(layer, attention, rotation_SC, input_TD, rows)
            addend_TD = layer.output(attention.attend_rows(rows, heads_THE))
            gate_up = layer.mlp.gate_up(_add_and_norm(layer.mlp_norm, x_TD, addend_TD))
            addend_TD = layer.mlp.down(
                activated(gate_up, is_silu=layer.mlp.activation.name == SILU.name)
            )
            if after_layer is not None:
                after_layer(done, x_TD + addend_TD)
        return x_TD if addend_TD is None else x_TD + addend_TD


def _stored_heads(
    layer: DecoderLayer,
    attention: CudaAttention,
    rotation_SC: Tensor,
    input_TD: Tensor,
    rows: DeviceRows,
) -> Tensor:
    """Returns the queries, keys and values of normed rows, after these were stored."""
    heads_THE = layer.qkv(input_TD).view(input_TD.shape[0], -1, layer.head_dim)
    norm = layer.head_norm
    if isinstance(norm, JointNorm):
        turned_THE, values_THE = heads_THE.tensor_split([-layer.num_kv_heads], dim=1)
        heads_THE, norm = torch.cat([norm(turned_THE), values_THE], dim=1), None
    attention.store(
        rows,
        heads_THE,
        rotation_SC,
        norm_HE=None if norm is None else norm.weight_HE,
        norm_eps=0.0 if norm is None else norm.eps,
    )
    return heads_THE


def _add_and_norm(norm: RmsNorm | None, x_TD: Tensor, addend_TD: Tensor | None) -> Tensor:
    """Adds `addend_TD` to x in place; returns the norm of x, or x without one."""
    if norm is not None:
        return normed(norm, x_TD if addend_TD is not None else x_TD.contiguous(), addend_TD)
    return x_TD if addend_TD is None else x_TD.add_(addend_TD)


def _on_gpu(pages: LayerPages) -> CudaAttention:
    attention = pages.attention
    assert isinstance(attention, CudaAttention)
    return attention
