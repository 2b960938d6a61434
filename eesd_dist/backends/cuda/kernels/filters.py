"""The choice among what filters leave, on a GPU in Triton: top_k, top_p and min_p.

No row is sorted. Of a row's best scores with noise, in their order, the first that the filters keep
is the choice: all better ones are excluded. Whether a token is kept follows from the mass and the
number of the tokens before it, sums of integers with the bits of `sampling.filters`. The mass of
what top_k leaves needs the k-th score, which is found digit by digit, by counting. Where none of
the candidates is kept the score of the choice is NaN. Annotations are quoted, since Triton's
compiler reads those of parameters as code.
"""

from typing import Any

import triton
import triton.language as tl

from eesd_dist.backends.cuda.kernels.choice import noise_of_columns, scaled

NUM_CANDIDATES = 8
_CANDIDATES = tl.constexpr(NUM_CANDIDATES)
NUM_DIGITS = 4
"""Digits of a score, of 8 bits each."""
_DIGITS = tl.constexpr(NUM_DIGITS)
NUM_SUMS = NUM_CANDIDATES + 1
"""Masses of a block: before each candidate, and of all tokens."""
_SUMS = tl.constexpr(NUM_SUMS)
_NO_COLUMN = tl.constexpr(2147483647)


# Shapes: V columns of a block, N candidates of all blocks, C = NUM_CANDIDATES, D digits, B blocks,
# S rows.
@triton.jit
def _mass(x_V: "Any") -> "Any":
    """Returns `elementary.mass_of`."""
    t_V = x_V * 1.4426950408889634
    t_V = tl.where(t_V > -45.0, t_V, -45.0)
    n_V = tl.floor(t_V)
    f_V = t_V - n_V
    series_V = ((f_V * 0.0018671301 + 0.0090170302) * f_V + 0.055799913) * f_V + 0.24016445
    series_V = (series_V * f_V + 0.69315131) * f_V + 1.0
    bits_V = (n_V.to(tl.int32) << 23) + series_V.to(tl.int32, bitcast=True)
    return (bits_V.to(tl.float32, bitcast=True) * 1099511627776.0).to(tl.int64)


@triton.jit
def _descending_key(scores_V: "Any") -> "Any":
    """Returns unsigned numbers in the reverse order of the scores; equal for 0.0 and -0.0."""
    bits_V = tl.where(scores_V == 0.0, 0.0, scores_V).to(tl.int32, bitcast=True)
    bits_V = bits_V ^ ((bits_V >> 31) & 0x7FFFFFFF)
    return bits_V.to(tl.uint32, bitcast=True) ^ 0x7FFFFFFF


@triton.jit
def _kth_digits(counts_D256: "Any", top_k: "Any", NUM_KNOWN: tl.constexpr) -> "Any":
    """Returns the first digits of the key of the k-th score, by the counts of each digit."""
    digit_256 = tl.arange(0, 256)
    digits, left = top_k * 0, top_k
    for at in tl.static_range(NUM_KNOWN):
        count_256 = tl.load(counts_D256 + 256 * at + digit_256)
        is_before_256 = tl.cumsum(count_256, 0) < left
        digits = (digits << 8) + tl.sum(is_before_256.to(tl.int32), 0)
        left -= tl.sum(tl.where(is_before_256, count_256, 0), 0)
    return digits.to(tl.uint32, bitcast=True)


@triton.jit
def _needs_kth(top_k: "Any", top_p: "Any") -> "Any":
    return (top_k > 0) & (top_p < 1.0)


@triton.jit
def _top_k(filters_S4: "Any", row: "Any", num_columns: "Any") -> "Any":
    """Returns 0 where it keeps all tokens."""
    top_k = tl.load(filters_S4 + 4 * row)
    return tl.where(top_k < num_columns, top_k, 0)


@triton.jit
def _top_p(filters_S4: "Any", row: "Any") -> "Any":
    """Returns the float64 of which a row has both halves."""
    low = tl.load(filters_S4 + 4 * row + 2).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(filters_S4 + 4 * row + 3).to(tl.int64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def candidates_kernel(
    logits: "Any",
    divisor_S: "Any",
    words_S3: "Any",
    ids: "Any",
    scores: "Any",
    columns: "Any",
    peaks: "Any",
    counts: "Any",
    num_columns: "Any",
    row_stride: "Any",
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Stores the best scores of a block of a row, [S, B, C], their columns, and the largest score
    without noise; clears the row's counts, [S, D, 256]."""
    row, block = tl.program_id(0), tl.program_id(1)
    for at in range(block, _DIGITS, tl.num_programs(1)):
        to_256 = counts + 256 * (row * _DIGITS + at) + tl.arange(0, 256)
        tl.store(to_256, tl.zeros([256], tl.int32))
    column_V = block * BLOCK + tl.arange(0, BLOCK)
    is_column_V = column_V < num_columns
    logits_V = tl.load(logits + row.to(tl.int64) * row_stride + column_V, mask=is_column_V)
    divisor = tl.load(divisor_S + row)
    score_V = scaled(logits_V, divisor, BLOCK)
    score_V = tl.where(is_column_V, score_V, float("-inf"))
    tl.store(peaks + row * tl.num_programs(1) + block, tl.max(score_V, 0))
    if divisor > 0:
        score_V += noise_of_columns(ids, column_V, is_column_V, words_S3 + 3 * row, HAS_IDS)
    at = (row * tl.num_programs(1) + block) * _CANDIDATES
    for candidate in range(_CANDIDATES):
        best = tl.max(score_V, 0)
        column = tl.min(tl.where(score_V == best, column_V, _NO_COLUMN), 0)
        tl.store(scores + at + candidate, best)
        tl.store(columns + at + candidate, column)
        score_V = tl.where(column_V == column, float("-inf"), score_V)


@triton.jit
def ranking_kernel(
    scores: "Any",
    columns: "Any",
    peaks: "Any",
    scores_SC: "Any",
    columns_SC: "Any",
    peak_S: "Any",
    num_blocks: "Any",
    PADDED_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Stores a row's best scores of all blocks in their order, of equal ones the first column's."""
    row = tl.program_id(0)
    block_B = tl.arange(0, PADDED_BLOCKS)
    peaks_B = tl.load(
        peaks + row * num_blocks + block_B, mask=block_B < num_blocks, other=float("-inf")
    )
    tl.store(peak_S + row, tl.max(peaks_B, 0))
    at_N = tl.arange(0, PADDED)
    is_candidate_N = at_N < num_blocks * _CANDIDATES
    from_N = row * num_blocks * _CANDIDATES + at_N
    scores_N = tl.load(scores + from_N, mask=is_candidate_N, other=float("-inf"))
    columns_N = tl.load(columns + from_N, mask=is_candidate_N, other=_NO_COLUMN)
    for candidate in range(_CANDIDATES):
        best = tl.max(scores_N, 0)
        column = tl.min(tl.where(scores_N == best, columns_N, _NO_COLUMN), 0)
        tl.store(scores_SC + row * _CANDIDATES + candidate, best)
        tl.store(columns_SC + row * _CANDIDATES + candidate, column)
        scores_N = tl.where(columns_N == column, float("-inf"), scores_N)


@triton.jit
def digit_kernel(
    logits: "Any",
    divisor_S: "Any",
    filters_S4: "Any",
    counts: "Any",
    num_columns: "Any",
    row_stride: "Any",
    AT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Counts a digit of the keys of a block that have the first digits of the k-th score."""
    row, block = tl.program_id(0), tl.program_id(1)
    top_k = _top_k(filters_S4, row, num_columns)
    if _needs_kth(top_k, _top_p(filters_S4, row)):
        counts_D256 = counts + 256 * row * _DIGITS
        column_V = block * BLOCK + tl.arange(0, BLOCK)
        is_column_V = column_V < num_columns
        logits_V = tl.load(logits + row.to(tl.int64) * row_stride + column_V, mask=is_column_V)
        key_V = _descending_key(scaled(logits_V, tl.load(divisor_S + row), BLOCK))
        if AT > 0:
            is_column_V &= (key_V >> (32 - 8 * AT)) == _kth_digits(counts_D256, top_k, AT)
        digit_V = ((key_V >> (24 - 8 * AT)) & 255).to(tl.int32)
        count_256 = tl.histogram(digit_V, 256, mask=is_column_V)
        to_256 = counts_D256 + 256 * AT + tl.arange(0, 256)
        tl.atomic_add(to_256, count_256, mask=count_256 > 0)


@triton.jit
def mass_kernel(
    logits: "Any",
    divisor_S: "Any",
    filters_S4: "Any",
    columns_SC: "Any",
    peak_S: "Any",
    counts: "Any",
    masses: "Any",
    numbers: "Any",
    num_columns: "Any",
    row_stride: "Any",
    BLOCK: tl.constexpr,
) -> None:
    """Stores the masses in a block of a row of the tokens before each candidate, and of all that
    top_k leaves, [S, B, C + 1]; and the numbers of larger scores, [S, B, C]."""
    row, block = tl.program_id(0), tl.program_id(1)
    top_k, top_p = _top_k(filters_S4, row, num_columns), _top_p(filters_S4, row)
    if (top_k > 0) | (top_p < 1.0):
        divisor = tl.load(divisor_S + row)
        logits += row.to(tl.int64) * row_stride
        column_V = block * BLOCK + tl.arange(0, BLOCK)
        is_column_V = column_V < num_columns
        score_V = scaled(tl.load(logits + column_V, mask=is_column_V), divisor, BLOCK)
        score_V = tl.where(is_column_V, score_V, float("-inf"))
        mass_V = tl.where(is_column_V, _mass(score_V - tl.load(peak_S + row)), 0)
        at = row * tl.num_programs(1) + block
        for candidate in range(_CANDIDATES):
            column = tl.load(columns_SC + row * _CANDIDATES + candidate)
            column_1 = column + tl.arange(0, 1)
            score = tl.max(scaled(tl.load(logits + column_1), divisor, 1), 0)
            is_equal_V = (score_V == score) & (column_V < column)
            before = tl.sum(tl.where((score_V > score) | is_equal_V, mass_V, 0), 0)
            tl.store(masses + at * _SUMS + candidate, before)
            number = tl.sum((score_V > score).to(tl.int32), 0)
            tl.store(numbers + at * _CANDIDATES + candidate, number)
        if _needs_kth(top_k, top_p):
            kth = _kth_digits(counts + 256 * row * _DIGITS, top_k, _DIGITS)
            mass_V = tl.where(_descending_key(score_V) <= kth, mass_V, 0)
        tl.store(masses + at * _SUMS + _CANDIDATES, tl.sum(mass_V, 0))


@triton.jit
def decision_kernel(
    logits: "Any",
    divisor_S: "Any",
    filters_S4: "Any",
    scores_SC: "Any",
    columns_SC: "Any",
    peak_S: "Any",
    masses: "Any",
    numbers: "Any",
    ids: "Any",
    best: "Any",
    num_blocks: "Any",
    num_columns: "Any",
    row_stride: "Any",
    HAS_IDS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
) -> None:
    """Stores the two best tokens of a row that the filters keep and the bits of their scores,
    [S, 4]: NaN and the best token of all where no candidate is kept, -inf where only one is."""
    row = tl.program_id(0)
    top_k, top_p = _top_k(filters_S4, row, num_columns), _top_p(filters_S4, row)
    divisor, peak = tl.load(divisor_S + row), tl.load(peak_S + row)
    lowest = peak + tl.load(filters_S4 + 4 * row + 1).to(tl.float32, bitcast=True)
    has_sums = (top_k > 0) | (top_p < 1.0)
    block_B = tl.arange(0, PADDED_BLOCKS)
    is_block_B = (block_B < num_blocks) & has_sums
    sums_B = masses + (row * num_blocks + block_B) * _SUMS
    total = tl.sum(tl.load(sums_B + _CANDIDATES, mask=is_block_B, other=0), 0)
    target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    target = tl.where(target > 1, target, 1)
    num_survivors = 0
    logits += row.to(tl.int64) * row_stride
    columns_SC += row * _CANDIDATES
    column, second_column = tl.load(columns_SC), tl.load(columns_SC + 1)
    score = tl.full([], float("nan"), tl.float32)
    second_score = tl.full([], float("-inf"), tl.float32)
    for candidate in range(_CANDIDATES):
        candidate_column = tl.load(columns_SC + candidate)
        column_1 = candidate_column + tl.arange(0, 1)
        own = tl.max(scaled(tl.load(logits + column_1), divisor, 1), 0)
        before = tl.sum(tl.load(sums_B + candidate, mask=is_block_B, other=0), 0)
        from_B = numbers + (row * num_blocks + block_B) * _CANDIDATES + candidate
        number = tl.sum(tl.load(from_B, mask=is_block_B, other=0), 0)
        is_in_top_p = (top_p >= 1.0) | (target > total) | (before < target)
        survives = (own >= lowest) & ((top_k == 0) | (number < top_k)) & is_in_top_p
        survives |= peak == float("-inf")  # no token is possible
        candidate_score = tl.load(scores_SC + row * _CANDIDATES + candidate)
        is_first, is_second = survives & (num_survivors == 0), survives & (num_survivors == 1)
        column = tl.where(is_first, candidate_column, column)
        score = tl.where(is_first, candidate_score, score)
        second_column = tl.where(is_second, candidate_column, second_column)
        second_score = tl.where(is_second, candidate_score, second_score)
        num_survivors += survives.to(tl.int32)
    if HAS_IDS:
        column, second_column = tl.load(ids + column), tl.load(ids + second_column)
    tl.store(best + 4 * row, column)
    tl.store(best + 4 * row + 1, second_column)
    tl.store(best + 4 * row + 2, score.to(tl.int32, bitcast=True))
    tl.store(best + 4 * row + 3, second_score.to(tl.int32, bitcast=True))
