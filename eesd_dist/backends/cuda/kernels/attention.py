"""Attention over pages on a GPU, in Triton.

The rows of a tile belong to one text and share the loads of its keys. Keys are taken in blocks of
`KEYS` from position 0 on, each with its own maximum; blocks are merged in order within a part of
`PART_BLOCKS` blocks, and the parts in order (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et
al. 2022, arXiv 2205.14135; parts in parallel: Dao et al. 2023, "Flash-Decoding"). The bounds of
blocks and parts depend on positions only, and merging a block that a row does not see changes
nothing. So a row has the same bits alone, in a batch, with or without other rows of its text in its
tile, and whether its keys are attended by one program or by several. For that, weights are summed
by a product with ones: a plain sum's order follows from how the compiler spreads a block over
threads. Launched without fused multiply-adds, which the compiler might place differently.
`CudaAttention` checks it.

Keys are looked up in the text's pages, a tree's in the order of their positions. Annotations are
quoted, since Triton's compiler reads those of parameters as code.
"""

from typing import Any

import triton
import triton.language as tl

from eesd_dist.backends.cuda.kernels.launches import launch_next, wait_for_previous


# Shapes: Q queries of a program's rows, N keys of a block, E channels of a head, padded to a power
# of two, C equal columns.
@triton.jit
def _merged(
    highest_Q: "Any", total_Q: "Any", sum_QE: "Any", other_Q: "Any", more_Q: "Any", more_QE: "Any"
) -> "Any":
    """Returns maximum, sum of weights and weighted sum of values over two sets of keys."""
    higher_Q = tl.maximum(highest_Q, other_Q)
    base_Q = tl.where(higher_Q == float("-inf"), 0.0, higher_Q)
    scale_Q, more_scale_Q = tl.exp2(highest_Q - base_Q), tl.exp2(other_Q - base_Q)
    total_Q = total_Q * scale_Q + more_Q * more_scale_Q
    return higher_Q, total_Q, sum_QE * scale_Q[:, None] + more_QE * more_scale_Q[:, None]


@triton.jit
def attend_kernel(
    heads: "Any",
    pages: "Any",
    mixed: "Any",
    weights: "Any",
    tiles_B8: "Any",
    slots: "Any",
    window: "Any",
    scale: "Any",
    softcap: "Any",
    NUM_KV: tl.constexpr,
    PER_KV: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_NUMBERS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Attends the rows of one tile to their keys; scores are in units of log2(e).

    With `SPLIT_BLOCKS`, to the keys of so many blocks only: stores the weighted sum of their values
    in `mixed`, and its maximum and sum of weights in `weights`.
    """
    tile, kv = tiles_B8 + 8 * tl.program_id(0), tl.program_id(1)
    first_row, num_rows = tl.load(tile), tl.load(tile + 1)
    first_position, last_key = tl.load(tile + 2), tl.load(tile + 3)
    in_order = tl.load(tile + 4)
    branch = slots + tl.load(tile + 5) - in_order
    table_W = slots + tl.load(tile + 6)
    first_key = 0
    if window > 0:
        first_key = tl.maximum(first_position + 1 - window, 0)
    first_block, past_block = first_key // KEYS, (last_key + KEYS) // KEYS
    if SPLIT_BLOCKS > 0:
        first_block = tl.maximum(first_block, tl.program_id(2) * SPLIT_BLOCKS)
        past_block = tl.minimum(past_block, (tl.program_id(2) + 1) * SPLIT_BLOCKS)
    if IS_DEPENDENT:
        launch_next()
        wait_for_previous()
    if (num_rows == 0) | (first_block >= past_block):
        return
    query_Q = tl.arange(0, QUERIES)
    row_Q = query_Q // PER_KV
    is_query_Q = row_Q < num_rows
    position_Q = first_position + row_Q
    first_key_Q = tl.zeros([QUERIES], tl.int32)
    if window > 0:
        first_key_Q = tl.maximum(position_Q + 1 - window, 0)
    row_Q += first_row
    kv_numbers: tl.constexpr = KEY_NUMBERS + PAGE_SIZE * VALUE_WIDTH
    channel_E = tl.arange(0, PADDED_CHANNELS)
    is_channel_E = channel_E < CHANNELS
    head_Q = (query_Q % PER_KV) * NUM_KV + kv
    row_numbers: tl.constexpr = (PER_KV + 2) * NUM_KV * CHANNELS
    from_QE = (row_Q.to(tl.int64) * row_numbers + head_Q * CHANNELS)[:, None] + channel_E[None, :]
    is_number_QE = is_query_Q[:, None] & is_channel_E[None, :]
    queries_QE = tl.load(heads + from_QE, mask=is_number_QE, other=0.0)
    ones_NC = tl.full([KEYS, 16], 1.0, queries_QE.dtype)
    nothing_Q = tl.full([QUERIES], float("-inf"), tl.float32)
    zeros_Q = tl.zeros([QUERIES], tl.float32)
    zeros_QE = tl.zeros([QUERIES, PADDED_CHANNELS], tl.float32)
    highest_Q, total_Q, sum_QE = nothing_Q, zeros_Q, zeros_QE
    chunk_highest_Q, chunk_total_Q, chunk_sum_QE = nothing_Q, zeros_Q, zeros_QE
    for block in range(first_block, past_block):
        key_N = block * KEYS + tl.arange(0, KEYS)
        is_key_N = (key_N >= first_key) & (key_N <= last_key)
        slot_N = key_N
        if in_order <= last_key:
            in_branch_N = is_key_N & (key_N >= in_order)
            slot_N = tl.where(in_branch_N, tl.load(branch + key_N, mask=in_branch_N), key_N)
        page_N = tl.load(table_W + slot_N // PAGE_SIZE, mask=is_key_N, other=0)
        kv_at_N = (page_N.to(tl.int64) * NUM_KV + kv) * kv_numbers
        key_at_N = kv_at_N + slot_N % PAGE_SIZE * CHANNELS
        value_at_N = kv_at_N + KEY_NUMBERS + slot_N % PAGE_SIZE * VALUE_WIDTH
        is_number_NE = is_key_N[:, None] & is_channel_E[None, :]
        keys_NE = tl.load(
            pages + key_at_N[:, None] + channel_E[None, :], mask=is_number_NE, other=0.0
        )
        values_NE = tl.load(
            pages + value_at_N[:, None] + channel_E[None, :], mask=is_number_NE, other=0.0
        )
        scores_QN = tl.dot(queries_QE, tl.trans(keys_NE), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores_QN = softcap * (1 - 2 / (tl.exp2(scores_QN) + 1))
        is_seen_QN = key_N[None, :] <= position_Q[:, None]
        if window > 0:
            is_seen_QN &= key_N[None, :] >= first_key_Q[:, None]
        scores_QN = tl.where(is_seen_QN, scores_QN, float("-inf"))
        block_Q = tl.max(scores_QN, 1)
        base_Q = tl.where(block_Q == float("-inf"), 0.0, block_Q)
        weights_QN = tl.exp2(scores_QN - base_Q[:, None]).to(values_NE.dtype)
        sums_QC = tl.dot(weights_QN, ones_NC, input_precision="ieee")  # columns are equal
        mixed_QE = tl.dot(weights_QN, values_NE, input_precision="ieee")
        chunk_highest_Q, chunk_total_Q, chunk_sum_QE = _merged(
            chunk_highest_Q, chunk_total_Q, chunk_sum_QE, block_Q, tl.max(sums_QC, 1), mixed_QE
        )
        if (block + 1) % PART_BLOCKS == 0:
            highest_Q, total_Q, sum_QE = _merged(
                highest_Q, total_Q, sum_QE, chunk_highest_Q, chunk_total_Q, chunk_sum_QE
            )
            chunk_highest_Q, chunk_total_Q, chunk_sum_QE = nothing_Q, zeros_Q, zeros_QE
    highest_Q, total_Q, sum_QE = _merged(
        highest_Q, total_Q, sum_QE, chunk_highest_Q, chunk_total_Q, chunk_sum_QE
    )
    to_Q = row_Q.to(tl.int64) * PER_KV * NUM_KV + head_Q
    if SPLIT_BLOCKS > 0:
        to_Q = to_Q * tl.num_programs(2) + tl.program_id(2)
        tl.store(weights + 2 * to_Q, highest_Q, mask=is_query_Q)
        tl.store(weights + 2 * to_Q + 1, total_Q, mask=is_query_Q)
    else:
        sum_QE = sum_QE / tl.where(total_Q > 0, total_Q, 1.0)[:, None]
    tl.store(mixed + to_Q[:, None] * CHANNELS + channel_E[None, :], sum_QE, mask=is_number_QE)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    splits: "Any",
    weights: "Any",
    mixed: "Any",
    position_R: "Any",
    window: "Any",
    num_splits: "Any",
    NUM_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Merges the splits of one row and query head, in the order of `attend_kernel`."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_R + row)
    first_key = 0
    if window > 0:
        first_key = tl.maximum(position + 1 - window, 0)
    first_split = first_key // (KEYS * SPLIT_BLOCKS)
    past_split = (position + KEYS * SPLIT_BLOCKS) // (KEYS * SPLIT_BLOCKS)
    channel_E = tl.arange(0, PADDED_CHANNELS)
    is_channel_1E = (channel_E < CHANNELS)[None, :]
    at = row.to(tl.int64) * NUM_HEADS + head
    index_1 = tl.arange(0, 1)
    nothing_1 = tl.full([1], float("-inf"), tl.float32)
    zeros_1 = tl.zeros([1], tl.float32)
    zeros_1E = tl.zeros([1, PADDED_CHANNELS], tl.float32)
    highest_1, total_1, sum_1E = nothing_1, zeros_1, zeros_1E
    chunk_highest_1, chunk_total_1, chunk_sum_1E = nothing_1, zeros_1, zeros_1E
    if IS_DEPENDENT:
        launch_next()
        wait_for_previous()
    for split in range(first_split, past_split):
        from_split = at * num_splits + split
        more_1E = tl.load(
            splits + from_split * CHANNELS + channel_E[None, :], mask=is_channel_1E, other=0.0
        )
        chunk_highest_1, chunk_total_1, chunk_sum_1E = _merged(
            chunk_highest_1,
            chunk_total_1,
            chunk_sum_1E,
            tl.load(weights + 2 * from_split + index_1),
            tl.load(weights + 2 * from_split + 1 + index_1),
            more_1E,
        )
        if (split + 1) % (PART_BLOCKS // SPLIT_BLOCKS) == 0:
            highest_1, total_1, sum_1E = _merged(
                highest_1, total_1, sum_1E, chunk_highest_1, chunk_total_1, chunk_sum_1E
            )
            chunk_highest_1, chunk_total_1, chunk_sum_1E = nothing_1, zeros_1, zeros_1E
    highest_1, total_1, sum_1E = _merged(
        highest_1, total_1, sum_1E, chunk_highest_1, chunk_total_1, chunk_sum_1E
    )
    sum_1E = sum_1E / tl.where(total_1 > 0, total_1, 1.0)[:, None]
    tl.store(mixed + at * CHANNELS + channel_E[None, :], sum_1E, mask=is_channel_1E)
