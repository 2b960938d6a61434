"""Noise and scores of tokens on a CPU, compiled, with the bits of `noise` and `rule`.

The same sequence of 32-bit integer and single float32 operations, in loops over arrays that LLVM
turns into vectors. No two operations may be fused: Numba does not unless it is told to.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from eesd_dist.backends.cpu.compiled import inner, kernel

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_TRIPLE_1, _TRIPLE_2 = np.uint32(0xED5AD4BB), np.uint32(0xAC4C1B51)
_TRIPLE_3 = np.uint32(0x31848BAB)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_EXPONENT_BITS = np.int32(-(1 << 23))
_LN2_PER_EXPONENT_BIT = np.float32(0.6931471805599453 / (1 << 23))
_ARTANH_3, _ARTANH_5 = np.float32(0.666556), np.float32(0.41202915)
_ZERO, _HALF, _ONE, _TWO = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(2.0)
_PER_2_32 = np.float32(2.0**-32)
_GOLDEN_64, _LOW = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFFFFFFFF)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@inner
def _neg_log(x: Floats, exponents: Ints, mantissas: Ints) -> None:
    """x = -log(x); the other two are memory for what is in between."""
    bits, m = x.view(np.int32), mantissas.view(np.float32)
    for v in range(len(x)):
        k = np.int32(np.int32(bits[v] - _SQRT_HALF_BITS) & _EXPONENT_BITS)
        exponents[v] = k
        mantissas[v] = np.int32(bits[v] - k)
    for v in range(len(x)):
        s = (_ONE - m[v]) / (m[v] + _ONE)
        z = s * s
        series = ((z * _ARTANH_5 + _ARTANH_3) * z + _TWO) * s
        x[v] = series - np.float32(exponents[v]) * _LN2_PER_EXPONENT_BIT


@inner
def _noise_row(
    words_3: npt.NDArray[np.uint32],
    ids_V: Ints,
    noise_V: Floats,
    lost_V: Floats,
    exponents_V: Ints,
    mantissas_V: Ints,
) -> None:
    """Fills noise_V: `hash_ids`, `exponential` and `neg_log` of each token."""
    first, second, third = words_3[0], words_3[1], words_3[2]
    for v in range(len(ids_V)):
        x = np.uint32(np.uint32(ids_V[v]) ^ first)
        x = np.uint32(x * _TRIPLE_1)
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(11))) + second)
        x = np.uint32(x * _TRIPLE_2)
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) ^ third)
        x = np.uint32(x * _TRIPLE_3)
        h = np.int32(np.uint32(x ^ np.uint32(x >> np.uint32(14))))
        y = (np.float32(h) + _HALF) * _PER_2_32
        upper = _ONE if y > _ZERO else _ZERO
        u = upper - y
        noise_V[v] = u
        lost_V[v] = (upper - u) - y
    _neg_log(noise_V, exponents_V, mantissas_V)
    for v in range(len(ids_V)):
        noise_V[v] = noise_V[v] - lost_V[v]
    _neg_log(noise_V, exponents_V, mantissas_V)


def _gumbel(words_S3: npt.NDArray[np.uint32], ids_V: Ints, noise_SV: Floats) -> None:
    lost_V = np.empty(len(ids_V), np.float32)
    exponents_V, mantissas_V = np.empty_like(ids_V), np.empty_like(ids_V)
    for row in range(len(words_S3)):
        _noise_row(words_S3[row], ids_V, noise_SV[row], lost_V, exponents_V, mantissas_V)


@inner
def first_largest(keys_V: Ints) -> int:
    largest = keys_V[0]
    for v in range(len(keys_V)):
        largest = max(largest, keys_V[v])
    at = len(keys_V)
    for v in range(len(keys_V)):
        at = min(at, v if keys_V[v] == largest else len(keys_V))
    return at


@inner
def score_row(
    logits_V: Floats,
    divisor: np.float32,
    words_3: npt.NDArray[np.uint32],
    ids_V: Ints,
    scores_V: Floats,
    lost_V: Floats,
    keys_V: Ints,
    mantissas_V: Ints,
) -> None:
    """Fills the scores: logits, divided and with noise if the divisor is not 0; and the keys, whole
    numbers of the same order, for which LLVM has vectors. The last four are memory [V]."""
    count = len(ids_V)
    if divisor > _ZERO:
        _noise_row(words_3, ids_V, scores_V, lost_V, keys_V, mantissas_V)
        for v in range(count):
            scores_V[v] = scores_V[v] + logits_V[v] / divisor
    else:
        for v in range(count):
            scores_V[v] = logits_V[v] + _ZERO  # -0 becomes 0, which is its equal
    bits_V = scores_V.view(np.int32)
    for v in range(count):
        bits = bits_V[v]
        keys_V[v] = np.int32(bits ^ np.int32(np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


@inner
def two_largest(keys_V: Ints) -> tuple[int, int]:
    """Returns the columns of the two largest keys, of equal ones the first; changes one key."""
    first = first_largest(keys_V)
    keys_V[first] = np.int32(-(2**31))
    return first, first_largest(keys_V)


@inner
def _mix_64(x: np.uint64) -> np.uint64:
    x = np.uint64(x + _GOLDEN_64)
    x = np.uint64((x ^ (x >> np.uint64(30))) * _MIX_1)
    x = np.uint64((x ^ (x >> np.uint64(27))) * _MIX_2)
    return np.uint64(x ^ (x >> np.uint64(31)))


@inner
def choice_words(mixed_seed: np.uint64, position: int, words_3: npt.NDArray[np.uint32]) -> None:
    """Fills the words of `noise.key_words` for the choice at a position; `mixed_seed`: of
    `noise.mixed_seed`."""
    key = _mix_64(_mix_64(np.uint64(mixed_seed + np.uint64(position))))
    words_3[0] = np.uint32(key & _LOW)
    words_3[1] = np.uint32(key >> np.uint64(32))
    words_3[2] = np.uint32(_mix_64(key) & _LOW)


def gumbel_rows(words_S3: npt.NDArray[np.int32], ids_V: Ints) -> Floats:
    """Returns the draws [S, V] of `noise.gumbel`."""
    noise_SV = np.empty((len(words_S3), len(ids_V)), np.float32)
    gumbel_kernel()(np.ascontiguousarray(words_S3).view(np.uint32), ids_V, noise_SV)
    return noise_SV


@cache
def gumbel_kernel() -> Callable[..., None]:
    return kernel(_gumbel)
