"""The layers of a span on a CPU: one compiled call for all rows and all layers.

A layer has two halves, attention and MLP, each of which ends with a product that is added to the
rows. Tensor-parallel ranks of one host sum the product at the end of the half, inside of the call.
The addition belongs to the half that follows, so that others can sum between two calls. The
residual stream, the heads and the sums of products are float32; the inputs of products are what the
weights' kind wants (`tiles`).

Every thread of a call runs this function with its part of the rows, channels or heads, and waits
for the others between the steps. No number depends on how they are divided.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32

from eesd_dist.backends.cpu.compiled import inner, is_kept, kernel
from eesd_dist.backends.cpu.kernels.attention import attend_rows
from eesd_dist.backends.cpu.kernels.kv_store import Geometry, store_rows
from eesd_dist.backends.cpu.kernels.lanes import (
    floats,
    fma,
    load,
    mul,
    store,
    store_input,
    swap_pairs,
)
from eesd_dist.backends.cpu.kernels.products import (
    Kind,
    add_normed_row,
    add_scaled_row,
    convert_row,
    copy_row,
    multiply,
    norm_row,
    thread_range,
)
from eesd_dist.backends.cpu.kernels.rank_sums import sum_over_ranks
from eesd_dist.backends.cpu.kernels.threads import wait
from eesd_dist.backends.cpu.kernels.tiles import BLOCK
from eesd_dist.backends.cpu.kernels.vector_math import gelu_tanh, silu
from eesd_dist.model import kv_layout
from eesd_dist.model.kv_layout import LANES, RowArrays
from eesd_dist.transport import sum_layout
from eesd_dist.transport.sum_layout import SumsCall

_FLOAT_BYTES = 4

# Columns of a layer's line in the table: addresses, 0 for what a family does not have.
ATTENTION_NORM, QKV, QKV_BIAS, HEAD_NORM, OUTPUT, OUTPUT_BIAS, ATTENTION_POST_NORM = range(7)
MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, MLP_POST_NORM = range(7, 13)
PAGES, WINDOW, ROTATION = 13, 14, 15
NUM_COLUMNS = 16


class Widths(NamedTuple):
    """Sizes of one layer; those of weights are what `products.multiply` takes."""

    hidden: int
    """A multiple of a block."""
    turned: int
    """Channels of all heads that positions rotate."""
    heads: int
    """Channels of all heads."""
    channels: int
    """Channels of the MLP."""
    hidden_steps: int
    mixed_steps: int
    channel_steps: int
    weight_bytes: int
    """Bytes of the weights of one output channel and one step."""
    bytes_per_input: int
    activation: int
    """0: SiLU, 1: GELU by tanh."""


class Scratch(NamedTuple):
    """Addresses of memory of the call, and the bytes from one row to the next."""

    x: int
    x_bytes: int
    inputs: int
    inputs_bytes: int
    wide: int
    """Heads, then gate and up."""
    wide_bytes: int
    addend: int
    """Address of what the half adds to x."""
    addend_bytes: int
    angles: int
    """Cosines of every channel of the turned heads, then signed sines."""
    angles_bytes: int


class Norms(NamedTuple):
    floor: np.float32
    """Added to the sum of squares of a row."""
    head_eps: np.float32
    """Added to the mean of squares of a head."""
    query_width: int
    """Channels of queries that are normed together: of a head, or of all."""
    key_width: int
    residual_scale: np.float32
    """Factor of what is added to a row without a norm."""


class LayersCall(NamedTuple):
    """Arguments of `run_layers` that are the same in all calls."""

    geometry: Geometry
    widths: Widths
    norms: Norms
    scratch: Scratch
    table: npt.NDArray[np.int64]
    sums: SumsCall
    """Sums over ranks, inside of the call."""


@inner
def _angles(
    geometry: Geometry,
    widths: Widths,
    scratch: Scratch,
    rotation_at: int,
    positions: npt.NDArray[np.int32],
    first: int,
    end: int,
) -> None:
    """Lays out cosines and signed sines as the channels of the turned heads are; after their end
    one and zero, so that a whole vector can be turned."""
    rotation = floats(rotation_at)
    stop = (widths.turned + LANES - 1) // LANES * LANES
    for row in range(first, end):
        at = scratch.angles + row * scratch.angles_bytes
        cosines = floats(at)
        sines = floats(at + stop * _FLOAT_BYTES)
        source = positions[row] * geometry.channels
        for e in range(0, geometry.channels, 2):
            cosines[e] = cosines[e + 1] = rotation[source + e]
            sines[e + 1] = rotation[source + e + 1]
            sines[e] = -sines[e + 1]
        for e in range(geometry.channels, widths.turned):
            cosines[e] = cosines[e - geometry.channels]
            sines[e] = sines[e - geometry.channels]
        for e in range(widths.turned, stop):
            cosines[e], sines[e] = float32(1.0), float32(0.0)


@inner
def _norm_heads(
    heads_at: int, weight_at: int, num_channels: int, width: int, eps: np.float32
) -> None:
    """Norms `width` channels at a time."""
    heads = floats(heads_at)
    weight = floats(weight_at)
    for first in range(0, num_channels, width):
        squares = float32(0.0)
        for e in range(first, first + width):
            squares += heads[e] * heads[e]
        inverse = float32(1.0) / np.sqrt(float32(squares / float32(width) + eps))
        for e in range(first, first + width):
            heads[e] = heads[e] * inverse * weight[e]


@inner
def _turn(heads_at: int, angles_at: int, width: int) -> None:
    """Rotates pairs of channels by their angles."""
    stop = (width + LANES - 1) // LANES * LANES
    for at in range(0, stop, LANES):
        x = load(heads_at, at)
        turned = mul(x, load(angles_at, at))
        store(heads_at, at, fma(swap_pairs(x), load(angles_at, stop + at), turned))


@inner
def _activate(kind: Kind, wide_at: int, inputs_at: int, width: int, activation: int) -> None:
    for at in range(0, width, LANES):
        gate, up = load(wide_at, at), load(wide_at, width + at)
        active = silu(gate) if activation == 0 else gelu_tanh(gate)
        store_input(kind, inputs_at, at, mul(active, up))


@inner
def _add_pending(
    layer: npt.NDArray[np.int64],
    post_norm: int,
    widths: Widths,
    norms: Norms,
    scratch: Scratch,
    row: int,
) -> None:
    x_at = scratch.x + row * scratch.x_bytes
    addend_at = scratch.addend + row * scratch.addend_bytes
    if layer[post_norm] == 0:
        add_scaled_row(x_at, addend_at, widths.hidden, norms.residual_scale)
    else:
        add_normed_row(x_at, addend_at, widths.hidden, norms.floor, layer[post_norm])


@inner
def _keep_rows(
    scratch: Scratch,
    widths: Widths,
    num_queries: int,
    rows: RowArrays,
    outputs: npt.NDArray[np.int32],
    num_outputs: int,
) -> None:
    """Moves these rows, their queries and what they see to the front; overwrites `rows`."""
    for at in range(num_outputs):
        row = outputs[at]
        if row == at:
            continue
        copy_row(scratch.x + at * scratch.x_bytes, scratch.x + row * scratch.x_bytes, widths.hidden)
        wide_at = scratch.wide + at * scratch.wide_bytes
        copy_row(wide_at, scratch.wide + row * scratch.wide_bytes, num_queries)
        rows.table_R[at] = rows.table_R[row]
        rows.position_R[at] = rows.position_R[row]
        rows.in_order_R[at] = rows.in_order_R[row]
        rows.branch_R[at] = rows.branch_R[row]


@inner
def _product(
    kind: Kind,
    widths: Widths,
    scratch: Scratch,
    weights: int,
    bias: int,
    num_out: int,
    first_block: int,
    num_steps: int,
    sums: int,
    sum_bytes: int,
    num_rows: int,
    thread: int,
    num_threads: int,
) -> None:
    num_blocks = (num_out + BLOCK - 1) // BLOCK - first_block
    first, end = thread_range(num_blocks, thread, num_threads)
    multiply(
        kind,
        weights,
        num_steps * BLOCK * widths.weight_bytes,
        num_steps,
        scratch.inputs,
        scratch.inputs_bytes,
        sums,
        sum_bytes,
        num_rows,
        bias,
        first_block + first,
        first_block + end,
    )


def run_layers(
    kind: Kind,
    geometry: Geometry,
    widths: Widths,
    norms: Norms,
    scratch: Scratch,
    table: npt.NDArray[np.int64],
    sums: SumsCall,
    rows: RowArrays,
    first_half: int,
    end_half: int,
    is_pending: bool,
    is_finished: bool,
    outputs: npt.NDArray[np.int32],
    num_outputs: int,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> None:
    """Runs halves [first_half, end_half) of the layers over the rows in `scratch.x`.

    `is_pending`: `scratch.addend` is to be added first; `is_finished`: also the last half's.
    The last layer stores the keys and values of all rows, and computes rows `outputs`, of which
    there are `num_outputs` in ascending order: they are then the first ones of `scratch.x`. Unless
    these are all rows, `rows` is overwritten. If a rank is lost, the results are garbage.
    """
    num_rows = len(rows.position_R)
    first_row, end_row = thread_range(num_rows, thread, num_threads)
    num_kv = geometry.num_kv
    kv_threads = num_threads if num_kv >= num_threads else 1
    row_threads = 1 if kv_threads == num_threads else num_threads
    first_kv, end_kv = thread_range(num_kv, thread % kv_threads, kv_threads)
    first_attended, end_attended = thread_range(num_rows, thread % row_threads, row_threads)
    queries = geometry.per_kv * geometry.num_kv * geometry.channels
    last_attention = 2 * len(table) - 2
    for half in range(first_half, end_half):
        layer = table[half // 2]
        is_attention = half % 2 == 0
        if is_attention and (half == 0 or layer[ROTATION] != table[half // 2 - 1, ROTATION]):
            rotation_at = layer[ROTATION]
            _angles(geometry, widths, scratch, rotation_at, rows.position_R, first_row, end_row)
        norm = layer[ATTENTION_NORM] if is_attention else layer[MLP_NORM]
        for row in range(first_row, end_row):
            if is_pending:
                before = table[(half - 1) // 2]
                post_norm = MLP_POST_NORM if is_attention else ATTENTION_POST_NORM
                _add_pending(before, post_norm, widths, norms, scratch, row)
            x_at = scratch.x + row * scratch.x_bytes
            inputs_at = scratch.inputs + row * scratch.inputs_bytes
            if norm != 0:
                norm_row(kind, x_at, widths.hidden, norms.floor, norm, inputs_at)
            else:
                convert_row(kind, x_at, widths.hidden, inputs_at)
        is_pending = True
        wait(counters, num_threads)
        first_block = 0
        if is_attention:
            weights, bias, num_out = layer[QKV], layer[QKV_BIAS], widths.heads
            if half == last_attention and num_outputs == 0:  # no queries
                first_block = queries // BLOCK
        else:
            weights, bias, num_out = layer[GATE_UP], layer[GATE_UP_BIAS], 2 * widths.channels
        _product(
            kind,
            widths,
            scratch,
            weights,
            bias,
            num_out,
            first_block,
            widths.hidden_steps,
            scratch.wide,
            scratch.wide_bytes,
            num_rows,
            thread,
            num_threads,
        )
        wait(counters, num_threads)
        if is_attention:
            for row in range(first_row, end_row):
                heads_at = scratch.wide + row * scratch.wide_bytes
                weight_at = layer[HEAD_NORM]
                if weight_at != 0:
                    _norm_heads(heads_at, weight_at, queries, norms.query_width, norms.head_eps)
                    _norm_heads(
                        heads_at + queries * _FLOAT_BYTES,
                        weight_at + queries * _FLOAT_BYTES,
                        widths.turned - queries,
                        norms.key_width,
                        norms.head_eps,
                    )
                _turn(heads_at, scratch.angles + row * scratch.angles_bytes, widths.turned)
            row_numbers = scratch.wide_bytes // _FLOAT_BYTES
            store_rows(geometry, rows, scratch.wide, row_numbers, layer[PAGES], first_row, end_row)
            wait(counters, num_threads)
            if half == last_attention and num_outputs < num_rows:
                if num_outputs == 0:
                    return
                if thread == 0:
                    _keep_rows(scratch, widths, queries, rows, outputs, num_outputs)
                wait(counters, num_threads)
                num_rows = num_outputs
                first_row, end_row = thread_range(num_rows, thread, num_threads)
                first_attended, end_attended = thread_range(
                    num_rows, thread % row_threads, row_threads
                )
            attend_rows(
                kind,
                geometry,
                layer[WINDOW],
                rows,
                scratch.wide,
                row_numbers,
                layer[PAGES],
                scratch.inputs,
                scratch.inputs_bytes // widths.bytes_per_input,
                first_attended,
                end_attended,
                first_kv,
                end_kv,
            )
            weights, bias, num_steps = layer[OUTPUT], layer[OUTPUT_BIAS], widths.mixed_steps
        else:
            for row in range(first_row, end_row):
                _activate(
                    kind,
                    scratch.wide + row * scratch.wide_bytes,
                    scratch.inputs + row * scratch.inputs_bytes,
                    widths.channels,
                    widths.activation,
                )
            weights, bias, num_steps = layer[DOWN], layer[DOWN_BIAS], widths.channel_steps
        wait(counters, num_threads)
        _product(
            kind,
            widths,
            scratch,
            weights,
            bias,
            widths.hidden,
            0,
            num_steps,
            scratch.addend,
            scratch.addend_bytes,
            num_rows,
            thread,
            num_threads,
        )
        wait(counters, num_threads)
        if sums.size > 1 and not sum_over_ranks(
            sums,
            scratch.addend,
            scratch.addend_bytes,
            widths.hidden,
            num_rows,
            counters,
            thread,
            num_threads,
        ):
            return
    if is_finished and is_pending:
        before = table[(end_half - 1) // 2]
        post_norm = MLP_POST_NORM if end_half % 2 == 0 else ATTENTION_POST_NORM
        for row in range(first_row, end_row):
            _add_pending(before, post_norm, widths, norms, scratch, row)


@cache
def layers_kernel() -> Callable[..., None]:
    return kernel(run_layers, kv_layout, sum_layout)


def is_layers_kernel_cached() -> bool:
    """Returns whether the kernel need not be compiled."""
    return is_kept(run_layers, kv_layout, sum_layout)
