"""A product with a weight matrix on a GPU, in Triton.

A program computes a tile of rows and output channels, from the first input channel to the last. A
row's sums do not depend on the other rows of its tile. Tiles of different sizes give the same bits
where the tensor cores add in the same order, which `kernels.rows_are_independent` checks.
"""

from typing import Any

import triton
import triton.language as tl

from eesd_dist.backends.cuda.kernels.launches import launch_next, wait_for_previous


# Shapes: M rows, I input channels, O output channels of a tile.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x: "Any",
    weight: "Any",
    bias: "Any",
    y: "Any",
    num_rows: "Any",
    num_out: "Any",
    num_in: "Any",
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    if IS_DEPENDENT:
        launch_next()
        wait_for_previous()
    row_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out_O = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_row_M1, is_out_1O = (row_M < num_rows)[:, None], (out_O < num_out)[None, :]
    x_M1 = x + row_M.to(tl.int64)[:, None] * num_in
    weight_1O = weight + out_O.to(tl.int64)[None, :] * num_in
    sum_MO = tl.zeros([ROWS, CHANNELS], tl.float32)
    for begin in range(0, num_in, DEPTH):
        in_I = begin + tl.arange(0, DEPTH)
        is_in_I = in_I < num_in
        if IS_EVEN:
            x_MI = tl.load(x_M1 + in_I[None, :], mask=is_row_M1, other=0.0)
            weight_IO = tl.load(weight_1O + in_I[:, None], mask=is_out_1O, other=0.0)
        else:
            x_MI = tl.load(x_M1 + in_I[None, :], mask=is_row_M1 & is_in_I[None, :], other=0.0)
            weight_IO = tl.load(
                weight_1O + in_I[:, None], mask=is_out_1O & is_in_I[:, None], other=0.0
            )
        sum_MO = tl.dot(x_MI, weight_IO, sum_MO)
    if HAS_BIAS:
        sum_MO += tl.load(bias + out_O, mask=out_O < num_out, other=0.0)[None, :]
    to_MO = row_M.to(tl.int64)[:, None] * num_out + out_O[None, :]
    tl.store(y + to_MO, sum_MO.to(y.dtype.element_ty), mask=is_row_M1 & is_out_1O)


@triton.jit(do_not_specialize=["num_rows"])
def descriptor_product_kernel(
    x: "Any",
    weight: "Any",
    bias: "Any",
    y: "Any",
    num_rows: "Any",
    num_out: "Any",
    num_in: "Any",
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """`product_kernel` with tiles copied by the tensor memory accelerator: x and weight are
    descriptors of [ROWS, DEPTH] and [CHANNELS, DEPTH]."""
    first_row, first_out = tl.program_id(0) * ROWS, tl.program_id(1) * CHANNELS
    sum_MO = tl.zeros([ROWS, CHANNELS], tl.float32)
    if IS_DEPENDENT:
        launch_next()
        wait_for_previous()
    for begin in range(0, num_in, DEPTH):
        x_MI = x.load([first_row, begin])
        weight_OI = weight.load([first_out, begin])
        sum_MO = tl.dot(x_MI, tl.trans(weight_OI), sum_MO)
    row_M, out_O = first_row + tl.arange(0, ROWS), first_out + tl.arange(0, CHANNELS)
    if HAS_BIAS:
        sum_MO += tl.load(bias + out_O, mask=out_O < num_out, other=0.0)[None, :]
    to_MO = row_M.to(tl.int64)[:, None] * num_out + out_O[None, :]
    is_number_MO = (row_M < num_rows)[:, None] & (out_O < num_out)[None, :]
    tl.store(y + to_MO, sum_MO.to(y.dtype.element_ty), mask=is_number_MO)
