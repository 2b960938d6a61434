"""The noise of `noise` on a CPU in one compiled call, with the same bits.

The same sequence of 32-bit integer and single float32 operations, in loops over arrays that LLVM
turns into vectors. No two operations may be fused: Numba does not unless it is told to.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from eesd_dist.compiled import inner, kernel

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


def _gumbel(words_S3: npt.NDArray[np.uint32], ids_V: Ints, noise_SV: Floats) -> None:
    """Fills noise_SV: `hash_ids`, `exponential` and `neg_log` of each row and token."""
    count = len(ids_V)
    lost = np.empty(count, np.float32)
    exponents, mantissas = np.empty_like(ids_V), np.empty_like(ids_V)
    for row in range(len(words_S3)):
        noise_V = noise_SV[row]
        first, second, third = words_S3[row, 0], words_S3[row, 1], words_S3[row, 2]
        for v in range(count):
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
            lost[v] = (upper - u) - y
        _neg_log(noise_V, exponents, mantissas)
        for v in range(count):
            noise_V[v] = noise_V[v] - lost[v]
        _neg_log(noise_V, exponents, mantissas)


def gumbel_rows(words_S3: npt.NDArray[np.int32], ids_V: Ints) -> Floats:
    """Returns the draws [S, V] of `noise.gumbel`."""
    noise_SV = np.empty((len(words_S3), len(ids_V)), np.float32)
    gumbel_kernel()(np.ascontiguousarray(words_S3).view(np.uint32), ids_V, noise_SV)
    return noise_SV


@cache
def gumbel_kernel() -> Callable[..., None]:
    return kernel(_gumbel)
