"""Elementary functions whose bits no device, row or shard can change.

Every device's library rounds exp and log in its own way, and some round an element differently at
the end of a row. These are made of nothing but 32-bit integer operations and single IEEE float32
additions and multiplications (no fused ones), element by element. What follows from them is the
same on a CPU, on a GPU and on any part of a vocabulary.
"""

import torch
from torch import Tensor

MASS_BITS = 40
"""`mass_of` counts in units of 2^-40: a vocabulary of 2^22 tokens sums up within 63 bits."""


def int32(value: int) -> Tensor:
    """A constant. As tensors because torch wraps a Python number at every use, which doubles the
    price of an operation on one row; zero-dimensional ones go with tensors of any device."""
    return torch.tensor(value, dtype=torch.int32, device="cpu")


def float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


_ONE, _TWO = float32(1.0), float32(2.0)
_SQRT_HALF_BITS = int32(0x3F3504F3)  # the float32 nearest to the square root of 1/2
_EXPONENT_BITS = int32(-(1 << 23))
_LN2_PER_EXPONENT_BIT = float32(0.6931471805599453 / (1 << 23))
# 2 artanh(s) / s = 2 + a s^2 + b s^4 within 3e-7 for |s| <= 0.1716: a minimax fit of our own.
_ARTANH_3, _ARTANH_5 = float32(0.666556), float32(0.41202915)

_LOG2_E = float32(1.4426950408889634)
_LOWEST = -45.0  # a number: on a GPU torch takes no tensor of the CPU for a clamp
_MANTISSA_BITS = int32(23)
_MASS_SCALE = float32(2.0**MASS_BITS)
# 2^f = 1 + f (c1 + f (c2 + ...)) within 9e-8 for 0 <= f < 1: a minimax fit of our own.
_EXP2_1, _EXP2_2, _EXP2_3, _EXP2_4, _EXP2_5 = (
    float32(c) for c in (0.69315131, 0.24016445, 0.055799913, 0.0090170302, 0.0018671301)
)


def neg_log(x: Tensor) -> Tensor:
    """-log(x) of positive normal float32, to about one unit in the last place.

    x = 2^k m with m in [sqrt(1/2), sqrt(2)), and -log m = 2 artanh(s) with s = (1 - m) / (1 + m).
    """
    bits = x.view(torch.int32)
    k = (bits - _SQRT_HALF_BITS).bitwise_and_(_EXPONENT_BITS)
    m = (bits - k).view(torch.float32)
    s = (_ONE - m).div_(m.add_(_ONE))
    z = s * s
    series = (z * _ARTANH_5).add_(_ARTANH_3).mul_(z).add_(_TWO).mul_(s)
    return series.sub_(k.float().mul_(_LN2_PER_EXPONENT_BIT))


def mass_of(x: Tensor) -> Tensor:
    """exp(x) of float32 x <= 0 as int64 in units of 2^-40, rounded down; within 3e-6 of its value.

    Sums of integers do not depend on their order: not on a device's scan, nor on how a vocabulary
    is cut. Below -27.7, -inf included, it is 0.
    """
    t = (x * _LOG2_E).clamp_min_(_LOWEST)
    n = t.floor()
    f = t.sub_(n)
    series = (f * _EXP2_5).add_(_EXP2_4).mul_(f).add_(_EXP2_3).mul_(f).add_(_EXP2_2).mul_(f)
    series = series.add_(_EXP2_1).mul_(f).add_(_ONE)
    bits = (n.to(torch.int32) << _MANTISSA_BITS).add_(series.view(torch.int32))
    return bits.view(torch.float32).mul_(_MASS_SCALE).long()
