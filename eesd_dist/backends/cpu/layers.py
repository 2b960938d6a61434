"""Layers ready to run in one compiled call per pass."""

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.backends.cpu.attention import STORED
from eesd_dist.backends.cpu.calls import call_in_threads, threads_for
from eesd_dist.backends.cpu.kernels.kv_store import Geometry
from eesd_dist.backends.cpu.kernels.layers import (
    ATTENTION_NORM,
    ATTENTION_POST_NORM,
    DOWN,
    DOWN_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    HEAD_NORM,
    MLP_NORM,
    MLP_POST_NORM,
    NUM_COLUMNS,
    OUTPUT,
    OUTPUT_BIAS,
    PAGES,
    QKV,
    QKV_BIAS,
    ROTATION,
    WINDOW,
    LayersCall,
    Norms,
    Scratch,
    Widths,
    layers_kernel,
)
from eesd_dist.backends.cpu.kernels.products import Kind
from eesd_dist.backends.cpu.kernels.tiles import BLOCK, in_blocks
from eesd_dist.backends.cpu.packed import (
    PackedProduct,
    bytes_per_input,
    kind_array,
    padded_vector,
    row_bytes,
)
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.elementwise import GELU_TANH, SILU
from eesd_dist.model.kernels import Linear
from eesd_dist.model.kv_layout import NO_ROWS, RowArrays
from eesd_dist.model.layers.layer import AfterLayer, DecoderLayer
from eesd_dist.model.layers.norms import JointNorm
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group_handles import HostGroup, host_group_of
from eesd_dist.transport.sum_layout import NO_SUMS, SLOT_BYTES

_FLOAT_BYTES = 4
_NO_INTS = np.zeros(0, np.int32)
_ACTIVATIONS = {SILU.name: 0, GELU_TANH.name: 1}


# Shapes: T rows, D hidden channels, S positions, P pairs of channels.
class CompiledLayers:
    """Layers with their pages. One call at a time: they share memory for what is between steps."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        pages: Sequence[LayerPages],
        rotations: Sequence[Tensor],
    ) -> None:
        """`rotations`: the table of each layer."""
        layer, shape = layers[0], pages[0].shape
        qkv, output, down = (
            _packed(product)
            for product in (layer.qkv, layer.output.product, layer.mlp.down.product)
        )
        self._layers = tuple(layers)
        self._group: TensorGroup = layer.output.group
        self._hidden_size = qkv.num_in
        self._owned: list[Tensor] = []
        self._table = np.array(
            [
                self._addresses(layer, rotation_SP)
                for layer, rotation_SP in zip(layers, rotations, strict=True)
            ],
            np.int64,
        )
        self.take_pages(pages)
        self._geometry = Geometry.of(shape, STORED[pages[0].pages_PKX.dtype])
        self._widths = Widths(
            hidden=in_blocks(qkv.num_in),
            turned=(layer.queries_per_kv + 1) * layer.num_kv_heads * layer.head_dim,
            heads=qkv.num_out,
            channels=down.num_in,
            hidden_steps=qkv.num_steps,
            mixed_steps=output.num_steps,
            channel_steps=down.num_steps,
            weight_bytes=qkv.weight_bytes,
            bytes_per_input=bytes_per_input(qkv.kind),
            activation=_ACTIVATIONS[layer.mlp.activation.name],
        )
        norm = layer.attention_norm or layer.output.norm
        assert norm is not None
        is_joint = isinstance(layer.head_norm, JointNorm)
        self._norms = Norms(
            floor=np.float32(norm.floor),
            head_eps=np.float32(layer.head_norm.eps if layer.head_norm else 0.0),
            query_width=shape.num_queries * shape.head_dim if is_joint else shape.head_dim,
            key_width=shape.num_kv_heads * shape.head_dim if is_joint else shape.head_dim,
            residual_scale=np.float32(layer.output.scale),
        )
        self._kind = kind_array(qkv.kind)
        self._products_per_row = len(layers) * (
            qkv.num_in * (qkv.num_out + output.num_in) + 3 * down.num_in * down.num_out
        )
        self._row_bytes = self._bytes_of_rows(output)
        self._memory = torch.zeros(0, dtype=torch.uint8)
        self._lock = Lock()
        self._calls: dict[int, LayersCall] = {}
        """Calls by number of rows, a power of two, in the present memory."""
        # Compiled while weights are loaded, not by the first request.
        self._run(NO_ROWS, self.call_over(0), 0, 0, False, False)

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        pages: Sequence[LayerPages],
        rotations: Sequence[Tensor],
    ) -> Self | None:
        """Returns None where the products of these layers are not compiled."""
        products = [
            product
            for layer in layers
            for product in (
                layer.qkv,
                layer.output.product,
                layer.mlp.gate_up,
                layer.mlp.down.product,
            )
        ]
        if not products or not all(isinstance(product, PackedProduct) for product in products):
            return None
        if len({_packed(product).kind for product in products}) > 1:
            return None
        return cls(layers, pages, rotations)

    def take_pages(self, pages: Sequence[LayerPages]) -> None:
        self._pages = tuple(pages)
        self._table[:, PAGES] = [layer_pages.pages_PKX.data_ptr() for layer_pages in pages]
        self._table[:, WINDOW] = [layer_pages.shape.window or 0 for layer_pages in pages]

    def forward(
        self, hidden_TD: Tensor, rows: RowPlan, *, after_layer: AfterLayer | None = None
    ) -> Tensor:
        """Computes the rows of one round [T, D] float32; writes their keys and values."""
        x_TD = self._padded(hidden_TD)
        is_whole = self._widths.hidden == self._hidden_size
        result_TD = x_TD if is_whole else x_TD.narrow(1, 0, self._hidden_size)
        needs_no_messages, end_half = self.needs_no_messages, 2 * len(self._layers)
        halves = 1 if not needs_no_messages else end_half if after_layer is None else 2
        call = self.call_over(len(x_TD))
        call = call._replace(scratch=call.scratch._replace(x=x_TD.data_ptr()))
        run = partial(self._run, rows.arrays, call)
        is_pending = False
        for first in range(0, end_half, halves):
            end = first + halves
            is_finished = end == end_half or (end % 2 == 0 and after_layer is not None)
            run(first, end, is_pending, is_finished and needs_no_messages)
            if not needs_no_messages:
                self._sum_over_ranks(call.scratch, len(x_TD))
                if is_finished:
                    run(end, end, True, True)
            is_pending = not is_finished
            if after_layer is not None and end % 2 == 0:
                after_layer(end // 2, result_TD)
        return result_TD

    def store_kv(self, hidden_TD: Tensor, rows: RowPlan) -> None:
        """Writes the keys and values of rows [T, D], of one layer: no rank waits for another."""
        assert len(self._layers) == 1, "the keys of a later layer follow from the one before"
        x_TD = self._padded(hidden_TD)
        call = self.call_over(len(x_TD))
        call = call._replace(scratch=call.scratch._replace(x=x_TD.data_ptr()))
        self._run(rows.arrays, call, 0, 1, False, False, num_outputs=0)

    @property
    def kind(self) -> Kind:
        """The kind of the layers' weights (`tiles`)."""
        return self._kind

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    @property
    def group(self) -> TensorGroup:
        """The ranks that each have a part of these layers."""
        return self._group

    @property
    def needs_no_messages(self) -> bool:
        """True if one call runs all of the layers: of one rank, or of ranks that sum inside of it.
        The same on every rank, and in the present epoch only."""
        return self._group.size == 1 or self._host_group is not None

    @property
    def _host_group(self) -> HostGroup | None:
        """The group, if it sums inside of calls."""
        fits = self._widths.hidden * _FLOAT_BYTES <= SLOT_BYTES
        return host_group_of(self._group) if fits else None

    def finish_sums(self) -> None:
        """Counts the sums of the last call over these layers. Raises PeerLost if a rank was lost:
        the results are garbage then."""
        group = self._host_group
        if group is not None:
            group.finish_sums()

    @property
    def products_per_row(self) -> int:
        return self._products_per_row

    @property
    def width(self) -> int:
        """Numbers in a row as kernels take them: `hidden_size`, padded to a block."""
        return self._widths.hidden

    def call_over(self, num_rows: int) -> LayersCall:
        """Returns what another kernel needs to run these layers over so many rows, at `scratch.x`.
        The call uses the memory of `forward`, and is valid until the next call of either. Call
        `finish_sums` after it."""
        with self._lock:  # another thread may be compiling
            call = self._call_over(1 << max(num_rows - 1, 0).bit_length())
        group = self._host_group
        return call if group is None else call._replace(sums=group.host_sums.call)

    def _call_over(self, capacity: int) -> LayersCall:
        cached = self._calls.get(capacity)
        if cached is not None:
            return cached
        scratch, size = _laid_out(self._row_bytes, capacity, first=self._memory.data_ptr())
        if size > len(self._memory):
            self._memory = torch.zeros(size, dtype=torch.uint8)
            self._calls.clear()
            scratch, _ = _laid_out(self._row_bytes, capacity, first=self._memory.data_ptr())
        call = self._calls[capacity] = LayersCall(
            geometry=self._geometry,
            widths=self._widths,
            norms=self._norms,
            scratch=scratch,
            table=self._table,
            sums=NO_SUMS,
        )
        return call

    def _padded(self, hidden_TD: Tensor) -> Tensor:
        """Returns a copy of the rows with zeros up to a whole block."""
        missing = self._widths.hidden - self._hidden_size
        x_TD = hidden_TD.detach() if hidden_TD.requires_grad else hidden_TD
        x_TD = x_TD.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return functional.pad(x_TD, (0, missing)) if missing else x_TD

    def _run(
        self,
        rows: RowArrays,
        call: LayersCall,
        first_half: int,
        end_half: int,
        is_pending: bool,
        is_finished: bool,
        num_outputs: int | None = None,
    ) -> None:
        """`num_outputs`: None: all rows, or none."""
        share = (end_half - first_half) / (2 * len(self._layers))
        call_in_threads(
            layers_kernel(),
            threads_for(int(len(rows.position_R) * self._products_per_row * share)),
            self._kind,
            *call,
            rows,
            first_half,
            end_half,
            is_pending,
            is_finished,
            _NO_INTS,
            len(rows.position_R) if num_outputs is None else num_outputs,
        )
        if end_half > first_half and num_outputs != 0:  # else another thread may sum now
            self.finish_sums()

    def _sum_over_ranks(self, scratch: Scratch, num_rows: int) -> None:
        """Sums what the half adds, in place."""
        start, size = scratch.addend - self._memory.data_ptr(), num_rows * self._row_bytes["addend"]
        local_TD = self._memory[start : start + size].view(torch.float32).view(num_rows, -1)
        total_TD = self._group.all_reduce(local_TD)
        if total_TD.data_ptr() != local_TD.data_ptr():
            local_TD.copy_(total_TD)

    def _bytes_of_rows(self, output: PackedProduct) -> dict[str, int]:
        widths = self._widths
        inputs = max(self._hidden_size, output.num_in, widths.channels)
        wide = max(widths.heads, 2 * widths.channels) + BLOCK
        return {
            "x": widths.hidden * _FLOAT_BYTES,
            "inputs": row_bytes(inputs, value_bytes=widths.bytes_per_input),
            "wide": row_bytes(wide, value_bytes=_FLOAT_BYTES),
            "addend": widths.hidden * _FLOAT_BYTES,
            "angles": 2 * in_blocks(widths.turned) * _FLOAT_BYTES,
        }

    def _addresses(self, layer: DecoderLayer, rotation_SP: Tensor) -> list[int]:
        line = [0] * NUM_COLUMNS
        line[ROTATION] = self._own(rotation_SP.contiguous())
        for column, norm in {
            ATTENTION_NORM: layer.attention_norm,
            ATTENTION_POST_NORM: layer.output.norm,
            MLP_NORM: layer.mlp_norm,
            MLP_POST_NORM: layer.mlp.down.norm,
        }.items():
            line[column] = 0 if norm is None else self._own(padded_vector(norm.scaled_weight_D))
        if layer.head_norm is not None:
            line[HEAD_NORM] = self._own(layer.head_norm.weight_HE.float().contiguous())
        for weights, bias, product in (
            (QKV, QKV_BIAS, layer.qkv),
            (OUTPUT, OUTPUT_BIAS, layer.output.product),
            (GATE_UP, GATE_UP_BIAS, layer.mlp.gate_up),
            (DOWN, DOWN_BIAS, layer.mlp.down.product),
        ):
            packed = _packed(product)
            line[weights], line[bias] = packed.address, packed.bias_address
        return line

    def _own(self, x: Tensor) -> int:
        self._owned.append(x)
        return x.data_ptr()


def _laid_out(
    bytes_per_row: Mapping[str, int], num_rows: int, *, first: int
) -> tuple[Scratch, int]:
    """Returns the places of so many rows of each kind, one kind after the other, and their size in
    bytes. Each begins at a multiple of a cache line."""
    places: dict[str, int] = {}
    size = 0
    for name, row_size in bytes_per_row.items():
        places |= {name: first + size, f"{name}_bytes": row_size}
        size += -(-num_rows * row_size // 64) * 64
    return Scratch(**places), size


def _packed(product: Linear) -> PackedProduct:
    assert isinstance(product, PackedProduct)
    return product
