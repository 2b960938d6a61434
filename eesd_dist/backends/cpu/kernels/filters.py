"""The filters of a row on a CPU: top_k, top_p and min_p, with the edges of `sampling.filters`.

Scores are counted and weighed in bins by their distance from the largest one. Only the bin that has
an edge is sorted. Bins are in the order of scores and masses are integers, so that the edge is that
of a sort of the whole row.
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


# Shapes: V columns, N = NUM_BINS.
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
    """Returns the bin of a distance; NaN is in the last one."""
    return int(float32(distance * _BINS_PER_UNIT)) if distance < _SPAN else NUM_BINS - 1


@inner
def _bin_members(scores_V: Floats, peak: np.float32, b: int, members_V: Floats) -> int:
    """Fills the scores of a bin, ascending. Returns how many there are."""
    count = 0
    for v in range(len(scores_V)):
        score = scores_V[v]
        if _bin(float32(peak - score)) == b and score == score:
            members_V[count] = score
            count += 1
    members_V[:count].sort()
    return count


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
    counts_N: Ints,
    members_V: Floats,
    powers_V: Ints,
    choice_scores_V: Floats,
    keys_V: Ints,
) -> None:
    """Gives the tokens that the row's filters exclude the lowest choice score and key.

    `scores_V`: edited logits, divided by the temperature, -inf for a token that a mask excludes;
    the last two are those of the choice, with noise. The four between are memory.
    """
    num_tokens = len(scores_V)
    top_k, top_p = filters.top_k_S[row], filters.top_p_S[row]
    peak = scores_V[0]
    for v in range(num_tokens):
        peak = max(peak, scores_V[v])
    if not peak > _LOWEST_SCORE:  # no token is possible
        return
    lowest = float32(peak + filters.log_min_p_S[row])
    edge, room = _LOWEST_SCORE, num_tokens
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
        power_1 = counts_N.view(np.float32)[:1]
        if has_top_k:
            at, before = 0, int64(0)
            while before + counts_N[at] < top_k:
                before += counts_N[at]
                at += 1
            num_members = _bin_members(scores_V, peak, at, members_V)
            kth = _LOWEST_SCORE
            if num_members > 0:
                kth = members_V[max(num_members - (top_k - before), 0)]
            masses_N[at] = 0
            for member in range(num_members):
                if members_V[member] >= kth:
                    masses_N[at] += _mass(float32(members_V[member] - peak), power_1)
            lowest, end = max(lowest, kth), at + 1
        if top_p < 1.0:
            total = int64(0)
            for b in range(end):
                total += masses_N[b]
            target = max(int64(np.ceil(top_p * np.float64(total))), int64(1))
            if target <= total:
                at, reached = 0, int64(0)
                while reached + masses_N[at] < target:
                    reached += masses_N[at]
                    at += 1
                member = _bin_members(scores_V, peak, at, members_V)
                while reached < target and member > 0:
                    member -= 1
                    room = room + 1 if members_V[member] == edge else 1
                    edge = members_V[member]
                    reached += _mass(float32(edge - peak), power_1)
                lowest = max(lowest, edge)
    for v in range(num_tokens):
        is_left = scores_V[v] >= lowest
        if scores_V[v] == edge:
            is_left = is_left and room > 0
            room -= 1
        if not is_left:
            choice_scores_V[v] = _LOWEST_SCORE
            keys_V[v] = LOWEST_KEY
