"""Noise and the two best scores of rows on a GPU, in Triton, with the bits of `noise` and `rule`.

The same sequence of 32-bit integer and single float32 operations as `noise.gumbel` and
`elementary.neg_log`. Launched without fused multiply-adds, which round once instead of twice; a
quotient is rounded as IEEE 754 says. Annotations are quoted, since Triton's compiler reads those of
parameters as code.
"""

from typing import Any

import triton
import triton.language as tl


# Shapes: V columns of a block, N candidates of a row.
@triton.jit
def _neg_log(x_V: "Any") -> "Any":
    bits_V = x_V.to(tl.int32, bitcast=True)
    k_V = (bits_V - 0x3F3504F3) & -8388608
    m_V = (bits_V - k_V).to(tl.float32, bitcast=True)
    s_V = tl.math.div_rn(1.0 - m_V, m_V + 1.0)
    z_V = s_V * s_V
    series_V = ((z_V * 0.41202915 + 0.666556) * z_V + 2.0) * s_V
    return series_V - k_V.to(tl.float32) * 8.262958294867817e-08


@triton.jit
def noise_of(ids_V: "Any", words: "Any") -> "Any":
    """Returns `noise.gumbel` of the tokens for the key with these three words."""
    x_V = ids_V.to(tl.uint32, bitcast=True) ^ tl.load(words).to(tl.uint32, bitcast=True)
    x_V = x_V * 0xED5AD4BB
    x_V = (x_V ^ (x_V >> 11)) + tl.load(words + 1).to(tl.uint32, bitcast=True)
    x_V = x_V * 0xAC4C1B51
    x_V = (x_V ^ (x_V >> 15)) ^ tl.load(words + 2).to(tl.uint32, bitcast=True)
    x_V = x_V * 0x31848BAB
    h_V = (x_V ^ (x_V >> 14)).to(tl.int32, bitcast=True)
    y_V = (h_V.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    upper_V = tl.where(y_V > 0, 1.0, 0.0)
    u_V = upper_V - y_V
    lost_V = (upper_V - u_V) - y_V
    return _neg_log(_neg_log(u_V) - lost_V)


@triton.jit
def gumbel_kernel(
    words_S3: "Any", ids: "Any", noise: "Any", num_columns: "Any", BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0)
    at_V = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column_V = at_V < num_columns
    ids_V = tl.load(ids + at_V, mask=is_column_V, other=0)
    to_V = row.to(tl.int64) * num_columns + at_V
    tl.store(noise + to_V, noise_of(ids_V, words_S3 + 3 * row), mask=is_column_V)


@triton.jit
def positive_nan(scores_V: "Any") -> "Any":
    """Returns the scores with NaN as infinity, as a CPU orders them: a column is always found."""
    return tl.where(scores_V == scores_V, scores_V, float("inf"))


@triton.jit
def scaled(logits_V: "Any", divisor: "Any", BLOCK: tl.constexpr) -> "Any":
    """Returns the scores before noise; NaN counts as infinite."""
    if divisor > 0:
        logits_V = tl.math.div_rn(logits_V, tl.zeros([BLOCK], tl.float32) + divisor)
    return positive_nan(logits_V)


@triton.jit
def noise_of_columns(
    ids: "Any", column_V: "Any", is_column_V: "Any", words_3: "Any", HAS_IDS: tl.constexpr
) -> "Any":
    ids_V = column_V
    if HAS_IDS:
        ids_V = tl.load(ids + column_V, mask=is_column_V, other=0).to(tl.int32)
    return noise_of(ids_V, words_3)


@triton.jit
def _two_best(scores_N: "Any", columns_N: "Any") -> "Any":
    """Returns the two largest scores and their columns, of equal ones the first."""
    scores_N = positive_nan(scores_N)
    first = tl.max(scores_N, 0)
    at_first = tl.min(tl.where(scores_N == first, columns_N, 2147483647), 0)
    remaining_N = tl.where(columns_N == at_first, float("-inf"), scores_N)
    second = tl.max(remaining_N, 0)
    is_second_N = (remaining_N == second) & (columns_N != at_first)
    return first, at_first, second, tl.min(tl.where(is_second_N, columns_N, 2147483647), 0)


@triton.jit
def block_kernel(
    logits: "Any",
    divisor_S: "Any",
    words_S3: "Any",
    ids: "Any",
    scores: "Any",
    columns: "Any",
    num_columns: "Any",
    row_stride: "Any",
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Stores the two best scores of a block of a row, [S, blocks, 2], and their columns."""
    row, block = tl.program_id(0), tl.program_id(1)
    column_V = block * BLOCK + tl.arange(0, BLOCK)
    is_column_V = column_V < num_columns
    logits_V = tl.load(logits + row.to(tl.int64) * row_stride + column_V, mask=is_column_V)
    divisor = tl.load(divisor_S + row)
    score_V = scaled(logits_V, divisor, BLOCK)
    if divisor > 0:
        score_V += noise_of_columns(ids, column_V, is_column_V, words_S3 + 3 * row, HAS_IDS)
    score_V = tl.where(is_column_V, score_V, float("-inf"))
    first, at_first, second, at_second = _two_best(score_V, column_V)
    at = 2 * (row * tl.num_programs(1) + block)
    tl.store(scores + at, first)
    tl.store(scores + at + 1, second)
    tl.store(columns + at, at_first)
    tl.store(columns + at + 1, at_second)


@triton.jit
def best_kernel(
    scores: "Any",
    columns: "Any",
    ids: "Any",
    best: "Any",
    num_candidates: "Any",
    HAS_IDS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Stores a row's two best tokens and the bits of their scores, [S, 4]."""
    row = tl.program_id(0)
    at_N = tl.arange(0, PADDED)
    is_candidate_N = at_N < num_candidates
    scores_N = tl.load(
        scores + row * num_candidates + at_N, mask=is_candidate_N, other=float("-inf")
    )
    columns_N = tl.load(
        columns + row * num_candidates + at_N, mask=is_candidate_N, other=2147483647
    )
    first, at_first, second, at_second = _two_best(scores_N, columns_N)
    if HAS_IDS:
        at_first, at_second = tl.load(ids + at_first), tl.load(ids + at_second)
    tl.store(best + 4 * row, at_first)
    tl.store(best + 4 * row + 1, at_second)
    tl.store(best + 4 * row + 2, first.to(tl.int32, bitcast=True))
    tl.store(best + 4 * row + 3, second.to(tl.int32, bitcast=True))
