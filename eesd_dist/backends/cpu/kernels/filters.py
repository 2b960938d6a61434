"""The filters of a row on a CPU: top_k, top_p and min_p, with the edges of `sampling.filters`.

Scores are counted and weighed in bins by their distance from the largest one. In the bin that has
an edge, which of a flat row has all scores, it is found digit by digit. Bins are in the order of
scores and masses are integers, so that the edge is that of a sort of the whole row.
"""

import numpy as np
import numpy.typing as npt
from numba import float32, int32, int64

from eesd_dist.backends.cpu.compiled import inner
from eesd_dist.backends.cpu.kernels.choice import Floats
from eesd_dist.model.kv_layout import Ints
from eesd_dist.sampling.row_filters import RowFilters

NUM_BINS = 1024
_SPAN = np.float32(28.0)
"""Distance in the last bin: masses are 0 from 27.7 on."""
_NUM_DIGITS = 4
_BINS_PER_UNIT = np.float32((NUM_BINS - 1) / 28.0)
_LOWEST_SCORE = np.float32(-np.inf)
LOWEST_KEY = np.int32(-0x7F800001)
"""The key of that score, as `score_row` makes keys."""

# Constants of `elementary.mass_of`.
_LOG2_E, _LOWEST_POWER = np.float32(1.4426950408889634), np.float32(-45.0)
_MANTISSA_BITS, _MASS_SCALE = np.int32(23), np.float32(2.0**40)
_EXP2_1, _EXP2_2 = np.float32(0.69315131), np.float32(0.24016445)
_EXP2_3, _EXP2_4 = np.float32(0.055799913), np.float32(0.0090170302)
_EXP2_5, _ONE = np.float32(0.0018671301), np.float32(1.0)

Longs = npt.NDArray[np.int64]


# Shapes: V columns, N = NUM_BINS, M members of a bin, D = 256 values of a digit.
@inner
def _mass(x: np.float32, power_1: Floats) -> np.int64:
    """Returns `elementary.mass_of`; `power_1` is memory."""
    t = max(float32(x * _LOG2_E), _LOWEST_POWER)
    n = np.floor(t)
    power_1[0] = _series(float32(t - n))
    bits_1 = power_1.view(np.int32)
    bits_1[0] = int32(bits_1[0] + int32(int32(n) << _MANTISSA_BITS))
    return int64(float32(power_1[0] * _MASS_SCALE))


@inner
def _series(f: np.float32) -> np.float32:
    series = float32(float32(f * _EXP2_5) + _EXP2_4)
    series = float32(float32(series * f) + _EXP2_3)
    series = float32(float32(series * f) + _EXP2_2)
    series = float32(float32(series * f) + _EXP2_1)
    return float32(float32(series * f) + _ONE)


@inner
def _fill_masses(scores_V: Floats, peak: np.float32, masses_V: Floats, powers_V: Ints) -> None:
    """Fills the masses before they are rounded down; `powers_V` is memory."""
    for v in range(len(scores_V)):
        t = max(float32(float32(scores_V[v] - peak) * _LOG2_E), _LOWEST_POWER)
        n = np.floor(t)
        powers_V[v] = int32(n) << _MANTISSA_BITS
        masses_V[v] = _series(float32(t - n))
    bits_V = masses_V.view(np.int32)
    for v in range(len(scores_V)):
        bits_V[v] = int32(bits_V[v] + powers_V[v])
    for v in range(len(scores_V)):
        masses_V[v] = float32(masses_V[v] * _MASS_SCALE)


@inner
def _bin(distance: np.float32) -> int:
    """Returns the bin of a distance; that between infinite scores, which is NaN, is in the first
    one."""
    if distance < _SPAN:
        return int(float32(distance * _BINS_PER_UNIT))
    return NUM_BINS - 1 if distance >= _SPAN else 0


@inner
def _bin_members(scores_V: Floats, peak: np.float32, b: int, members_V: Floats) -> int:
    """Fills the scores of a bin. Returns how many there are."""
    count = 0
    for v in range(len(scores_V)):
        if _bin(float32(peak - scores_V[v])) == b:
            members_V[count] = scores_V[v]
            count += 1
    return count


@inner
def _edge(
    members_M: Floats,
    target: np.int64,
    peak: np.float32,
    by_mass: bool,
    weights_D: Longs,
    power_1: Floats,
) -> tuple[np.float32, np.int64]:
    """Returns the largest score such that it and those above weigh the target, and the weight
    above. A score weighs its mass or 1. It is found digit by digit, in a fixed number of passes."""
    bits_M = members_M.view(np.int32)
    prefix, above = int64(0), int64(0)
    for at in range(_NUM_DIGITS):
        shift = 8 * (_NUM_DIGITS - 1 - at)
        weights_D[:] = 0
        for m in range(len(members_M)):
            bits = bits_M[m] if members_M[m] != 0 else int32(0)
            key = int64(0x7FFFFFFF) - int64(bits ^ int32(int32(bits >> 31) & int32(0x7FFFFFFF)))
            if key >> (shift + 8) == prefix:
                weight = _mass(float32(members_M[m] - peak), power_1) if by_mass else int64(1)
                weights_D[(key >> shift) & 255] += weight
        digit = 0
        while digit < 255 and above + weights_D[digit] < target:
            above += weights_D[digit]
            digit += 1
        prefix = (prefix << 8) | digit
    ordered = int32(int64(0x7FFFFFFF) - prefix)
    bits_1 = power_1.view(np.int32)
    bits_1[0] = int32(ordered ^ int32(int32(ordered >> 31) & int32(0x7FFFFFFF)))
    return power_1[0], above


@inner
def scaled(logit: np.float32, divisor: np.float32) -> np.float32:
    """Returns a score before noise; NaN counts as infinite."""
    score = float32(logit / divisor)
    return score if score == score else float32(np.inf)


@inner
def _edge_in_bins(
    scores_V: Floats,
    peak: np.float32,
    weights_N: Longs,
    target: np.int64,
    by_mass: bool,
    members_V: Floats,
    memory_N: Longs,
) -> tuple[np.float32, np.int64, int, int]:
    """Returns `_edge` of a whole row, the bin of the edge, and how many members that bin has.

    `weights_N`: of the bins, which weigh the target together; may be `memory_N`.
    """
    at, before = 0, int64(0)
    while before + weights_N[at] < target:
        before += weights_N[at]
        at += 1
    num_members = _bin_members(scores_V, peak, at, members_V)
    edge, above = _edge(
        members_V[:num_members],
        target - before,
        peak,
        by_mass,
        memory_N[:256],
        memory_N[-1:].view(np.float32)[:1],
    )
    return edge, before + above, at, num_members


@inner
def has_filter(filters: RowFilters, row: int) -> bool:
    return (
        filters.top_k_S[row] > 0
        or filters.top_p_S[row] < 1.0
        or filters.log_min_p_S[row] > _LOWEST_SCORE
    )


@inner
def filter_row(
    scores_V: Floats,
    filters: RowFilters,
    row: int,
    masses_N: Longs,
    counts_N: Longs,
    members_V: Floats,
    powers_V: Ints,
    choice_scores_V: Floats,
    keys_V: Ints,
) -> None:
    """Gives the tokens that the row's filters exclude the lowest choice score and key.

    `scores_V`: edited logits, divided by the temperature, infinite for NaN, -inf for a token that a
    mask excludes;
    the last two are those of the choice, with noise. The four between are memory.
    """
    num_tokens = len(scores_V)
    top_k, top_p = filters.top_k_S[row], filters.top_p_S[row]
    peak = scores_V[0]
    for v in range(num_tokens):
        peak = max(peak, scores_V[v])
    if not peak > _LOWEST_SCORE:  # no token is possible
        return
    lowest, edge, room = _LOWEST_SCORE, _LOWEST_SCORE, int64(num_tokens)
    if filters.log_min_p_S[row] > _LOWEST_SCORE:
        lowest = float32(peak + filters.log_min_p_S[row])
    has_top_k = 0 < top_k < num_tokens
    if has_top_k or top_p < 1.0:
        _fill_masses(scores_V, peak, members_V, powers_V)
        masses_N[:] = 0
        counts_N[:] = 0
        for v in range(num_tokens):
            b = _bin(float32(peak - scores_V[v]))
            counts_N[b] += 1
            masses_N[b] += int64(members_V[v])
        end = NUM_BINS
        power_1 = counts_N[-1:].view(np.float32)[:1]  # memory, once the counts are not needed
        if has_top_k:
            kth, _, at, num_members = _edge_in_bins(
                scores_V, peak, counts_N, int64(top_k), False, members_V, counts_N
            )
            masses_N[at] = 0
            for m in range(num_members):
                if members_V[m] >= kth:
                    masses_N[at] += _mass(float32(members_V[m] - peak), power_1)
            lowest, end = max(lowest, kth), at + 1
        if top_p < 1.0:
            total = int64(0)
            for b in range(end):
                total += masses_N[b]
            target = max(int64(np.ceil(top_p * np.float64(total))), int64(1))
            if target <= total:
                edge, above, _, _ = _edge_in_bins(
                    scores_V, peak, masses_N, target, True, members_V, counts_N
                )
                mass = max(_mass(float32(edge - peak), power_1), int64(1))
                room = (target - above + mass - 1) // mass
                lowest = max(lowest, edge)
    for v in range(num_tokens):
        is_left = not scores_V[v] < lowest
        if scores_V[v] == edge:
            is_left = is_left and room > 0
            room -= 1
        if not is_left:
            choice_scores_V[v] = _LOWEST_SCORE
            keys_V[v] = LOWEST_KEY
