"""Work on a row between the products of a layer, on a GPU in Triton: one launch for all rows.

A program computes a fixed part of one row, in float32, so that a row has the same bits in every
batch. Annotations are quoted, since Triton's compiler reads those of parameters as code.
"""

from typing import Any

import triton
import triton.language as tl

from eesd_dist.backends.cuda.kernels.launches import launch_next, wait_for_previous


# Shapes: D hidden channels, I intermediate channels, E channels of a head, P pairs of them, each
# padded to a power of two.
@triton.jit
def norm_kernel(
    x: "Any",
    addend: "Any",
    weight_D: "Any",
    normed: "Any",
    floor: "Any",
    WIDTH: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Adds `addend` to a row of x, in place, and stores its norm (see `RmsNorm`)."""
    at_D = tl.arange(0, PADDED_WIDTH)
    is_channel_D = at_D < WIDTH
    row_D = tl.program_id(0).to(tl.int64) * WIDTH + at_D
    weights_D = tl.load(weight_D + at_D, mask=is_channel_D, other=0.0)
    if IS_DEPENDENT:
        launch_next()
        wait_for_previous()
    x_D = tl.load(x + row_D, mask=is_channel_D, other=0.0)
    if HAS_ADDED:
        sum_D = x_D.to(tl.float32) + tl.load(addend + row_D, mask=is_channel_D, other=0.0)
        x_D = sum_D.to(x_D.dtype)
        tl.store(x + row_D, x_D, mask=is_channel_D)
    wide_D = x_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_D * wide_D, 0) + floor)
    tl.store(normed + row_D, wide_D * scale * weights_D, mask=is_channel_D)


@triton.jit
def activation_kernel(
    gate_up: "Any",
    activated: "Any",
    WIDTH: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Stores activation(gate) * up; a row of `gate_up` is its gates, then its ups."""
    row = tl.program_id(0).to(tl.int64)
    at_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel_I = at_I < WIDTH
    if IS_DEPENDENT:
        launch_next()
        wait_for_previous()
    gate_I = tl.load(gate_up + 2 * row * WIDTH + at_I, mask=is_channel_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up + (2 * row + 1) * WIDTH + at_I, mask=is_channel_I, other=0.0)
    logit_I = gate_I
    if not IS_SILU:  # GELU by its approximation with tanh, (1 + tanh(z)) / 2 = sigmoid(2 z)
        logit_I = 1.5957691216057308 * (gate_I + 0.044715 * gate_I * gate_I * gate_I)
    small_I = tl.exp(-tl.abs(logit_I))
    active_I = gate_I * tl.where(logit_I > 0, 1.0, small_I) / (1 + small_I)
    tl.store(activated + row * WIDTH + at_I, active_I * up_I, mask=is_channel_I)


@triton.jit
def store_kernel(
    heads: "Any",
    pages: "Any",
    rotation: "Any",
    norm_weight: "Any",
    norm_eps: "Any",
    position_T: "Any",
    kv_slot_T: "Any",
    table_T: "Any",
    slots: "Any",
    NUM_QUERIES: tl.constexpr,
    NUM_KV: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_NUMBERS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Norms one head of a row (see `HeadNorm`), rotates it by the row's position, in place, and
    stores keys and values.

    Heads are query heads, then keys, then values; values are stored as they are. Rows without a
    slot are padding. `rotation` has a cosine and a sine for each position and pair.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    kv_slot = tl.load(kv_slot_T + row)
    if IS_DEPENDENT:
        launch_next()
        wait_for_previous()
    if kv_slot >= 0:
        pair_P = tl.arange(0, PAIRS)
        is_pair_P = pair_P < CHANNELS // 2
        num_heads = NUM_QUERIES + 2 * NUM_KV
        first_P = (row.to(tl.int64) * num_heads + head) * CHANNELS + 2 * pair_P
        a_P = tl.load(heads + first_P, mask=is_pair_P, other=0.0)
        b_P = tl.load(heads + first_P + 1, mask=is_pair_P, other=0.0)
        if HAS_NORM and head < NUM_QUERIES + NUM_KV:
            real_P, imaginary_P = a_P.to(tl.float32), b_P.to(tl.float32)
            squares = tl.sum(real_P * real_P + imaginary_P * imaginary_P, 0)
            scale = tl.rsqrt(squares / CHANNELS + norm_eps)
            weight_P = norm_weight + head * CHANNELS + 2 * pair_P
            even_P = tl.load(weight_P, mask=is_pair_P)
            odd_P = tl.load(weight_P + 1, mask=is_pair_P)
            a_P = ((real_P * scale).to(even_P.dtype) * even_P).to(a_P.dtype)
            b_P = ((imaginary_P * scale).to(odd_P.dtype) * odd_P).to(b_P.dtype)
        if HAS_ROTATION and head < NUM_QUERIES + NUM_KV:
            turn_P = tl.load(position_T + row).to(tl.int64) * CHANNELS + 2 * pair_P
            cosine_P = tl.load(rotation + turn_P, mask=is_pair_P, other=0.0)
            sine_P = tl.load(rotation + turn_P + 1, mask=is_pair_P, other=0.0)
            real_P, imaginary_P = a_P.to(tl.float32), b_P.to(tl.float32)
            a_P = (real_P * cosine_P - imaginary_P * sine_P).to(a_P.dtype)
            b_P = (real_P * sine_P + imaginary_P * cosine_P).to(b_P.dtype)
        if head < NUM_QUERIES:
            if HAS_ROTATION:
                tl.store(heads + first_P, a_P, mask=is_pair_P)
                tl.store(heads + first_P + 1, b_P, mask=is_pair_P)
        else:
            page = tl.load(slots + tl.load(table_T + row) + kv_slot // PAGE_SIZE).to(tl.int64)
            within = kv_slot % PAGE_SIZE
            kv_numbers = KEY_NUMBERS + PAGE_SIZE * VALUE_WIDTH
            if head < NUM_QUERIES + NUM_KV:
                at = pages + (page * NUM_KV + head - NUM_QUERIES) * kv_numbers + within * CHANNELS
            else:
                at = pages + (page * NUM_KV + head - NUM_QUERIES - NUM_KV) * kv_numbers
                at += KEY_NUMBERS + within * VALUE_WIDTH
            tl.store(at + 2 * pair_P, a_P, mask=is_pair_P)
            tl.store(at + 2 * pair_P + 1, b_P, mask=is_pair_P)
