"""Elementwise functions of vectors: the same sequence of operations in every lane."""

import numpy as np
from numba import float32, njit

from eesd_dist.backends.cpu.kernels.lanes import (
    add,
    div,
    floor,
    fma,
    maximum,
    minimum,
    mul,
    power_of_two,
    splat,
)

_SQRT_2_OVER_PI = np.float32(0.7978845608028654)


@njit(nogil=True, error_model="numpy")
def exp(x):  # type: ignore[no-untyped-def]
    """Returns e^x for x <= 88, to 2 units in the last place; below -87 e^-87.

    2^k * e^r with |r| <= log(2) / 2, and Cephes' polynomial for e^r (Moshier, `expf`).
    """
    x = maximum(x, splat(float32(-87.0)))
    k = floor(fma(x, splat(float32(1.4426950408889634)), splat(float32(0.5))))
    r = fma(k, splat(float32(-0.693359375)), x)
    r = fma(k, splat(float32(2.12194440e-4)), r)
    p = fma(splat(float32(1.9875691500e-4)), r, splat(float32(1.3981999507e-3)))
    p = fma(p, r, splat(float32(8.3334519073e-3)))
    p = fma(p, r, splat(float32(4.1665795894e-2)))
    p = fma(p, r, splat(float32(1.6666665459e-1)))
    p = fma(p, r, splat(float32(5.0000001201e-1)))
    p = fma(mul(p, r), r, add(r, splat(float32(1.0))))
    return mul(p, power_of_two(k))


@njit(nogil=True, error_model="numpy")
def _times_sigmoid(x, y):  # type: ignore[no-untyped-def]
    """Returns x / (1 + e^-y)."""
    power = exp(minimum(mul(y, splat(float32(-1.0))), splat(float32(87.0))))
    return div(x, add(splat(float32(1.0)), power))


@njit(nogil=True, error_model="numpy")
def silu(x):  # type: ignore[no-untyped-def]
    return _times_sigmoid(x, x)


@njit(nogil=True, error_model="numpy")
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """Returns x / 2 * (1 + tanh(y)) = x * sigmoid(2 y), y = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    cubed = fma(mul(mul(x, x), x), splat(float32(0.044715)), x)
    return _times_sigmoid(x, mul(cubed, splat(float32(2.0) * float32(_SQRT_2_OVER_PI))))
