"""Elementary functions with the same bits on every device, in every row and on every shard.

Device libraries round exp and log differently, and some round an element differently at the end of
a row. The functions here use only 32-bit integer operations and single IEEE float32 additions and
multiplications (no fused ones), element by element. Their results are the same on a CPU, on a GPU
and on any part of a vocabulary.
"""

import torch
from torch import Tensor

MASS_BITS = 40
"""`mass_of` counts in units of 2^-40: the sum over 2^22 tokens fits in 63 bits."""


def int32(value: int) -> Tensor:
    """Returns a constant as a tensor: torch wraps a Python number at every use, which doubles the
    cost of an operation on one row. Zero-dimensional tensors work with tensors of any device."""
    return torch.tensor(value, dtype=torch.int32, device="cpu")


def float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


_ONE, _TWO = float32(1.0), float32(2.0)
_SQRT_HALF_BITS = int32(0x3F3504F3)  # the float32 nearest to the square root of 1/2
_EXPONENT_BITS = int32(-(1 << 23))
_LN2_PER_EXPONENT_BIT = float32(0.6931471805599453 / (1 << 23))
# 2 artanh(s) / s = 2 + a s^2 + b s^4 within 3e-7 for |s| <= 0.1716: a minimax fit.
_ARTANH_3, _ARTANH_5 = float32(0.666556), float32(0.41202915)

_LOG2_E = float32(1.4426950408889634)
_LOWEST = -45.0  # not a tensor: torch's clamp on a GPU takes no CPU tensor
_MANTISSA_BITS = int32(23)
_MASS_SCALE = float32(2.0**MASS_BITS)
# 2^f = 1 + f (c1 + f (c2 + ...)) within 9e-8 for 0 <= f < 1: a minimax fit.
_EXP2_1, _EXP2_2, _EXP2_3, _EXP2_4, _EXP2_5 = (
    float32(c) for c in (0.69315131, 0.24016445, 0.055799913, 0.0090170302, 0.0018671301)
)


def neg_log(x: Tensor) -> Tensor:
    """Returns -log(x) of positive normal float32, to about one unit in the last place.

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
    """Returns exp(x) of float32 x <= 0 as int64 in units of 2^-40, rounded down.

    Within 3e-6 of the exact value; 0 below -27.7, -inf included. Sums of integers do not depend on
    their order, so neither on a device's scan nor on the sharding of a vocabulary.
    """
    t = (x * _LOG2_E).clamp_min_(_LOWEST)
    n = t.floor()
    f = t.sub_(n)
    series = (f * _EXP2_5).add_(_EXP2_4).mul_(f).add_(_EXP2_3).mul_(f).add_(_EXP2_2).mul_(f)
    series = series.add_(_EXP2_1).mul_(f).add_(_ONE)
    bits = (n.to(torch.int32) << _MANTISSA_BITS).add_(series.view(torch.int32))
    return bits.view(torch.float32).mul_(_MASS_SCALE).long()
