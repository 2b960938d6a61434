"""Attention over pages on a GPU, in Triton: one launch for all rows of a layer.

A program computes the queries of one row and one KV head, block by block of keys from position 0
on, with a running maximum and sum (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022,
arXiv 2205.14135). Annotations are quoted, since Triton's compiler reads those of parameters as code. Shapes of its products and bounds of its blocks depend on the row's position
only, so that a row has the same bits in every batch. Keys are found one by one in the row's pages,
a tree's in the order of their positions.
"""

from typing import Any

import triton
import triton.language as tl


# Shapes: Q queries, N keys of a block, E channels of a head, padded to a power of two.
@triton.jit
def attend_kernel(
    heads: "Any",
    pages: "Any",
    mixed: "Any",
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
) -> None:
    row, kv = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_R + row)
    in_order = tl.load(in_order_R + row)
    branch = slots + tl.load(branch_R + row) - in_order
    table_W = slots + tl.load(table_R + row)
    key_numbers = CHANNELS * KEY_WIDTH
    part = key_numbers + PAGE_SIZE * VALUE_WIDTH
    query_Q = tl.arange(0, QUERIES)
    channel_E = tl.arange(0, PADDED_CHANNELS)
    is_channel_E = channel_E < CHANNELS
    is_query_QE = (query_Q < PER_KV)[:, None] & is_channel_E[None, :]
    head_Q1 = (query_Q * NUM_KV + kv)[:, None] * CHANNELS
    row_numbers = (PER_KV + 2) * NUM_KV * CHANNELS
    at_QE = row.to(tl.int64) * row_numbers + head_Q1 + channel_E[None, :]
    queries_QE = tl.load(heads + at_QE, mask=is_query_QE, other=0.0)
    first_key = tl.maximum(position + 1 - window, 0) if window > 0 else 0
    highest_Q = tl.full([QUERIES], float("-inf"), tl.float32)
    total_Q = tl.zeros([QUERIES], tl.float32)
    sum_QE = tl.zeros([QUERIES, PADDED_CHANNELS], tl.float32)
    for begin in range(first_key // KEYS * KEYS, position + 1, KEYS):
        key_N = begin + tl.arange(0, KEYS)
        is_seen_N = (key_N >= first_key) & (key_N <= position)
        in_branch_N = is_seen_N & (key_N >= in_order)
        slot_N = tl.where(in_branch_N, tl.load(branch + key_N, mask=in_branch_N, other=0), key_N)
        page_N = tl.load(table_W + slot_N // PAGE_SIZE, mask=is_seen_N, other=0)
        part_N = (page_N.to(tl.int64) * NUM_KV + kv) * part
        within_N = slot_N % PAGE_SIZE
        keys_EN = tl.load(
            pages + part_N[None, :] + channel_E[:, None] * KEY_WIDTH + within_N[None, :],
            mask=is_channel_E[:, None] & is_seen_N[None, :],
            other=0.0,
        )
        scores_QN = tl.dot(queries_QE, keys_EN, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores_QN = softcap * (1 - 2 / (tl.exp(2 * scores_QN / softcap) + 1))
        scores_QN = tl.where(is_seen_N[None, :], scores_QN, float("-inf"))
        higher_Q = tl.maximum(highest_Q, tl.max(scores_QN, 1))
        kept_Q = tl.exp(highest_Q - higher_Q)
        weights_QN = tl.exp(scores_QN - higher_Q[:, None])
        values_NE = tl.load(
            pages
            + part_N[:, None]
            + key_numbers
            + within_N[:, None] * VALUE_WIDTH
            + channel_E[None, :],
            mask=is_seen_N[:, None] & is_channel_E[None, :],
            other=0.0,
        )
        total_Q = total_Q * kept_Q + tl.sum(weights_QN, 1)
        mixed_QE = tl.dot(weights_QN.to(values_NE.dtype), values_NE, input_precision="ieee")
        sum_QE = sum_QE * kept_Q[:, None] + mixed_QE
        highest_Q = higher_Q
    to_QE = row.to(tl.int64) * PER_KV * NUM_KV * CHANNELS + head_Q1 + channel_E[None, :]
    total_Q = tl.where(total_Q > 0, total_Q, 1.0)  # padding rows see no key
    tl.store(mixed + to_QE, sum_QE / total_Q[:, None], mask=is_query_QE)
