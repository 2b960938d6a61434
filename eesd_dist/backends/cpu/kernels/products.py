"""The product with a packed weight, and a norm before it: parts of the compiled calls."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32

from eesd_dist.backends.cpu.compiled import inner, kernel
from eesd_dist.backends.cpu.kernels.lanes import (
    add,
    fma,
    load,
    mul,
    splat,
    store,
    store_input,
    total,
)
from eesd_dist.backends.cpu.kernels.threads import wait
from eesd_dist.backends.cpu.kernels.tiles import BLOCK, MOST_ROWS, tile
from eesd_dist.model import kv_layout
from eesd_dist.model.kv_layout import LANES

Kind = npt.NDArray[np.generic]
"""An empty array; its type is the kind of weights (`tiles`)."""

_BLOCK_BYTES = 4 * BLOCK
"""Bytes of a block of sums."""
_STEP_INPUT_BYTES = 4
"""Bytes of a row's inputs of one step: a number, or a pair of them."""
_CHUNK_BYTES = 1 << 14
"""Bytes of the weights of a block with which all rows are computed before the next ones: half of a
first-level cache."""


@inner
def thread_range(count: int, thread: int, num_threads: int) -> tuple[int, int]:
    """Returns the run of `count` things that `thread` computes."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


@inner
def copy_row(target_at: int, source_at: int, width: int) -> None:
    """Copies numbers, and what follows them up to a whole vector."""
    for at in range(0, width, LANES):
        store(target_at, at, load(source_at, at))


@inner
def add_row(x_at: int, addend_at: int, width: int) -> None:
    for at in range(0, width, LANES):
        store(x_at, at, add(load(x_at, at), load(addend_at, at)))


@inner
def add_scaled_row(x_at: int, addend_at: int, width: int, scale: np.float32) -> None:
    factor = splat(scale)
    for at in range(0, width, LANES):
        store(x_at, at, add(load(x_at, at), mul(load(addend_at, at), factor)))


@inner
def multiply(
    kind: Kind,
    weights: int,
    block_bytes: int,
    num_steps: int,
    inputs: int,
    input_bytes: int,
    sums: int,
    sum_bytes: int,
    num_rows: int,
    bias: int,
    first_block: int,
    end_block: int,
) -> None:
    """sums = inputs @ weights + bias in the output channels of blocks [first_block, end_block).

    Addresses of the first number each, `bias` 0 for none; distances of blocks and rows in bytes.
    """
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    tile_rows = (num_rows + num_tiles - 1) // num_tiles
    # Tiles after the first find their weights in the first-level cache, and begin to read the next
    # ones from memory.
    step_bytes = block_bytes // num_steps
    chunk = num_steps if num_tiles == 1 else _CHUNK_BYTES // step_bytes
    prefetch_bytes = step_bytes // num_tiles if num_rows >= MOST_ROWS else 0
    for block in range(first_block, end_block):
        for step in range(0, num_steps, chunk):
            count = min(chunk, num_steps - step)
            weights_at = weights + block * block_bytes + step * step_bytes
            prefetch_at = weights_at + count * step_bytes
            if step + count == num_steps and block + 1 == end_block:
                prefetch_at = weights_at
            for row in range(0, num_rows, tile_rows):
                tile(
                    kind,
                    weights_at,
                    inputs + row * input_bytes + step * _STEP_INPUT_BYTES,
                    input_bytes,
                    count,
                    sums + (row * sum_bytes + block * _BLOCK_BYTES),
                    sum_bytes,
                    int(step == 0),
                    prefetch_at + row // tile_rows * count * prefetch_bytes,
                    prefetch_bytes,
                    min(tile_rows, num_rows - row),
                )
    if bias != 0:
        skipped = first_block * _BLOCK_BYTES
        for row in range(num_rows):
            at = sums + row * sum_bytes + skipped
            add_row(at, bias + skipped, (end_block - first_block) * BLOCK)


@inner
def inverse_norm(x_at: int, width: int, floor: np.float32) -> np.float32:
    """Returns 1 / sqrt(|x|^2 + floor); the width is a multiple of two vectors."""
    even = odd = splat(float32(0.0))
    for at in range(0, width, 2 * LANES):
        x, y = load(x_at, at), load(x_at, at + LANES)
        even, odd = fma(x, x, even), fma(y, y, odd)
    inverse: np.float32 = float32(1.0) / np.sqrt(float32(total(add(even, odd)) + floor))
    return inverse


@inner
def norm_row(
    kind: Kind, x_at: int, width: int, floor: np.float32, weight_at: int, inputs_at: int
) -> None:
    """Writes the normed row as inputs of a product."""
    inverse = splat(inverse_norm(x_at, width, floor))
    for at in range(0, width, LANES):
        y = mul(mul(load(x_at, at), inverse), load(weight_at, at))
        store_input(kind, inputs_at, at, y)


@inner
def convert_row(kind: Kind, x_at: int, width: int, inputs_at: int) -> None:
    for at in range(0, width, LANES):
        store_input(kind, inputs_at, at, load(x_at, at))


@inner
def add_normed_row(
    x_at: int, addend_at: int, width: int, floor: np.float32, weight_at: int
) -> None:
    """Adds a row that is normed first."""
    inverse = splat(inverse_norm(addend_at, width, floor))
    for at in range(0, width, LANES):
        y = mul(mul(load(addend_at, at), inverse), load(weight_at, at))
        store(x_at, at, add(load(x_at, at), y))


_FLOAT_BYTES = 4


class LmHead(NamedTuple):
    """A norm and the LM head after it, as `multiply` takes them."""

    norm_at: int
    floor: np.float32
    weights: int
    block_bytes: int
    num_steps: int
    bias: int
    width: int
    """Width of the rows, padded to a block."""


@inner
def norm_rows(
    kind: Kind,
    head: LmHead,
    x_at: int,
    x_bytes: int,
    inputs: int,
    input_bytes: int,
    rows: npt.NDArray[np.int32],
    first: int,
    end: int,
) -> None:
    """Writes the normed rows `rows[first:end]` of x as inputs `first` to `end` of the product."""
    for at in range(first, end):
        source, target = x_at + rows[at] * x_bytes, inputs + at * input_bytes
        norm_row(kind, source, head.width, head.floor, head.norm_at, target)


def run_product(
    kind: Kind,
    x_at: int,
    width: int,
    norm_at: int,
    floor: np.float32,
    inputs_at: int,
    input_bytes: int,
    weights: int,
    weight_bytes: int,
    num_steps: int,
    bias_at: int,
    sums_at: int,
    sum_width: int,
    num_rows: int,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> None:
    """Multiplies rows at `x_at`, normed if there is a norm, into sums."""
    first_row, end_row = thread_range(num_rows, thread, num_threads)
    for row in range(first_row, end_row):
        source, target = x_at + row * width * _FLOAT_BYTES, inputs_at + row * input_bytes
        if norm_at != 0:
            norm_row(kind, source, width, floor, norm_at, target)
        else:
            convert_row(kind, source, width, target)
    wait(counters, num_threads)
    first, end = thread_range(sum_width // BLOCK, thread, num_threads)
    multiply(
        kind,
        weights,
        num_steps * BLOCK * weight_bytes,
        num_steps,
        inputs_at,
        input_bytes,
        sums_at,
        sum_width * _FLOAT_BYTES,
        num_rows,
        bias_at,
        first,
        end,
    )


@cache
def product_kernel() -> Callable[..., None]:
    return kernel(run_product, kv_layout)
