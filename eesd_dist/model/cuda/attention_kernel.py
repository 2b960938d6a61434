"""Attention over pages on a GPU, in Triton.

A row's keys are taken in parts of `PART` keys and those in blocks of `KEYS`, from position 0 on,
with a running maximum and sum over the blocks of a part, then over the parts (Milakov and
Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135; parts in parallel: Dao et al.
2023, "Flash-Decoding"). The bounds of blocks and parts depend on positions only. So a row has the
same bits alone, in a batch, with or without other rows of its text in the same program, and whether
its parts are computed by one program or by several. For that, weights are summed by a product with
ones: a plain sum's order follows from how the compiler spreads a block over threads. Launched
without fused multiply-adds, which the compiler might place differently. `CudaAttention` checks it.

Keys are found one by one in the row's pages, a tree's in the order of their positions. Annotations
are quoted, since Triton's compiler reads those of parameters as code.
"""

from typing import Any

import triton
import triton.language as tl


# Shapes: Q queries of a program's rows, N keys of a block, E channels of a head, padded to a power
# of two, C equal columns.
@triton.jit
def _merged(
    highest_Q: "Any", total_Q: "Any", sum_QE: "Any", other_Q: "Any", more_Q: "Any", more_QE: "Any"
) -> "Any":
    """Returns maximum, sum of weights and weighted sum of values over two sets of keys."""
    higher_Q = tl.maximum(highest_Q, other_Q)
    base_Q = tl.where(higher_Q == float("-inf"), 0.0, higher_Q)
    kept_Q, taken_Q = tl.exp(highest_Q - base_Q), tl.exp(other_Q - base_Q)
    total_Q = total_Q * kept_Q + more_Q * taken_Q
    return higher_Q, total_Q, sum_QE * kept_Q[:, None] + more_QE * taken_Q[:, None]


@triton.jit
def attend_kernel(
    heads: "Any",
    pages: "Any",
    mixed: "Any",
    weights: "Any",
    block_B: "Any",
    table_R: "Any",
    position_R: "Any",
    in_order_R: "Any",
    branch_R: "Any",
    slots: "Any",
    window: "Any",
    scale: "Any",
    softcap: "Any",
    NUM_KV: tl.constexpr,
    PER_KV: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Attends one row, or with `HAS_BLOCKS` the rows [first, last] of one text, to its keys.

    With `IS_SPLIT` to those of one part only: stores the weighted sum of its values in `mixed`, and
    its maximum and sum of weights in `weights`.
    """
    kv = tl.program_id(1)
    first_row = tl.program_id(0)
    last_row = first_row
    if HAS_BLOCKS:
        last_row = tl.load(block_B + 2 * first_row + 1)
        first_row = tl.load(block_B + 2 * first_row)
    query_Q = tl.arange(0, QUERIES)
    row_Q = first_row + query_Q // PER_KV
    is_query_Q = row_Q <= last_row
    position_Q = tl.load(position_R + row_Q, mask=is_query_Q, other=-1)
    first_key_Q = tl.where(window > 0, tl.maximum(position_Q + 1 - window, 0), 0)
    last_key = tl.load(position_R + last_row)
    first_key = tl.load(position_R + first_row) + 1 - window if window > 0 else 0
    first_key = tl.maximum(first_key, 0)
    in_order = tl.load(in_order_R + last_row)
    branch = slots + tl.load(branch_R + last_row) - in_order
    table_W = slots + tl.load(table_R + last_row)
    key_numbers = CHANNELS * KEY_WIDTH
    part_numbers = key_numbers + PAGE_SIZE * VALUE_WIDTH
    channel_E = tl.arange(0, PADDED_CHANNELS)
    is_channel_E = channel_E < CHANNELS
    head_Q = (query_Q % PER_KV) * NUM_KV + kv
    row_numbers = (PER_KV + 2) * NUM_KV * CHANNELS
    from_QE = (row_Q.to(tl.int64) * row_numbers + head_Q * CHANNELS)[:, None] + channel_E[None, :]
    is_number_QE = is_query_Q[:, None] & is_channel_E[None, :]
    queries_QE = tl.load(heads + from_QE, mask=is_number_QE, other=0.0)
    ones_NC = tl.full([KEYS, 16], 1.0, queries_QE.dtype)
    highest_Q = tl.full([QUERIES], float("-inf"), tl.float32)
    total_Q = tl.zeros([QUERIES], tl.float32)
    sum_QE = tl.zeros([QUERIES, PADDED_CHANNELS], tl.float32)
    first_part, past_part = first_key // PART, (last_key + PART) // PART
    if IS_SPLIT:
        past_part = tl.minimum(past_part, tl.program_id(2) + 1)
        first_part = tl.maximum(first_part, tl.program_id(2))
        is_query_Q = is_query_Q & (first_part + 0 * query_Q < past_part)  # or store nothing
    for part in range(first_part, past_part):
        begin = tl.maximum(part * PART, first_key // KEYS * KEYS)
        end = tl.minimum((part + 1) * PART, last_key + 1)
        part_highest_Q = tl.full([QUERIES], float("-inf"), tl.float32)
        part_total_Q = tl.zeros([QUERIES], tl.float32)
        part_sum_QE = tl.zeros([QUERIES, PADDED_CHANNELS], tl.float32)
        for at in range(begin, end, KEYS):
            key_N = at + tl.arange(0, KEYS)
            is_key_N = (key_N >= first_key) & (key_N <= last_key)
            in_branch_N = is_key_N & (key_N >= in_order)
            branch_N = tl.load(branch + key_N, mask=in_branch_N, other=0)
            slot_N = tl.where(in_branch_N, branch_N, key_N)
            page_N = tl.load(table_W + slot_N // PAGE_SIZE, mask=is_key_N, other=0)
            part_N = (page_N.to(tl.int64) * NUM_KV + kv) * part_numbers
            within_N = slot_N % PAGE_SIZE
            keys_EN = tl.load(
                pages + part_N[None, :] + channel_E[:, None] * KEY_WIDTH + within_N[None, :],
                mask=is_channel_E[:, None] & is_key_N[None, :],
                other=0.0,
            )
            values_NE = tl.load(
                pages
                + part_N[:, None]
                + key_numbers
                + within_N[:, None] * VALUE_WIDTH
                + channel_E[None, :],
                mask=is_key_N[:, None] & is_channel_E[None, :],
                other=0.0,
            )
            scores_QN = tl.dot(queries_QE, keys_EN, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                scores_QN = softcap * (1 - 2 / (tl.exp(2 * scores_QN / softcap) + 1))
            is_seen_QN = (key_N[None, :] >= first_key_Q[:, None]) & (
                key_N[None, :] <= position_Q[:, None]
            )
            scores_QN = tl.where(is_seen_QN, scores_QN, float("-inf"))
            block_Q = tl.max(scores_QN, 1)
            higher_Q = tl.maximum(part_highest_Q, block_Q)
            base_Q = tl.where(higher_Q == float("-inf"), 0.0, higher_Q)
            kept_Q = tl.exp(part_highest_Q - base_Q)
            weights_QN = tl.exp(scores_QN - base_Q[:, None])
            weights_QN = weights_QN.to(values_NE.dtype)
            sums_QC = tl.dot(weights_QN, ones_NC, input_precision="ieee")  # columns are equal
            part_total_Q = part_total_Q * kept_Q + tl.max(sums_QC, 1)
            mixed_QE = tl.dot(weights_QN, values_NE, input_precision="ieee")
            part_sum_QE = part_sum_QE * kept_Q[:, None] + mixed_QE
            part_highest_Q = higher_Q
        highest_Q, total_Q, sum_QE = _merged(
            highest_Q, total_Q, sum_QE, part_highest_Q, part_total_Q, part_sum_QE
        )
    to_Q = row_Q.to(tl.int64) * PER_KV * NUM_KV + head_Q
    if IS_SPLIT:
        to_Q = to_Q * tl.num_programs(2) + tl.program_id(2)
        tl.store(weights + 2 * to_Q, highest_Q, mask=is_query_Q)
        tl.store(weights + 2 * to_Q + 1, total_Q, mask=is_query_Q)
    else:
        sum_QE = sum_QE / tl.where(total_Q > 0, total_Q, 1.0)[:, None]  # padding sees no key
    tl.store(
        mixed + to_Q[:, None] * CHANNELS + channel_E[None, :],
        sum_QE,
        mask=is_query_Q[:, None] & is_channel_E[None, :],
    )


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    parts: "Any",
    weights: "Any",
    mixed: "Any",
    position_R: "Any",
    window: "Any",
    num_parts: "Any",
    NUM_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Merges the parts of one row and query head, in the order of `attend_kernel`."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_R + row)
    first_key = tl.maximum(position + 1 - window, 0) if window > 0 else 0
    channel_E = tl.arange(0, PADDED_CHANNELS)
    is_channel_E = channel_E < CHANNELS
    at = row.to(tl.int64) * NUM_HEADS + head
    one_1 = tl.arange(0, 1)
    highest_1 = tl.full([1], float("-inf"), tl.float32)
    total_1 = tl.zeros([1], tl.float32)
    sum_1E = tl.zeros([1, PADDED_CHANNELS], tl.float32)
    for part in range(first_key // PART, (position + PART) // PART):
        from_part = at * num_parts + part
        more_1E = tl.load(
            parts + from_part * CHANNELS + channel_E[None, :],
            mask=is_channel_E[None, :],
            other=0.0,
        )
        highest_1, total_1, sum_1E = _merged(
            highest_1,
            total_1,
            sum_1E,
            tl.load(weights + 2 * from_part + one_1),
            tl.load(weights + 2 * from_part + 1 + one_1),
            more_1E,
        )
    sum_1E = sum_1E / tl.where(total_1 > 0, total_1, 1.0)[:, None]
    tl.store(mixed + at * CHANNELS + channel_E[None, :], sum_1E, mask=is_channel_E[None, :])
