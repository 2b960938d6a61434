"""Noise that anyone can make again: a pure function of (seed, position, stream, token).

The stages of a pipeline, the shards of a vocabulary and a replica that resumes somebody else's
request all need the same noise without talking to each other. It is made by hashing, with no
state, and by nothing but 32-bit integer operations and single IEEE float32 additions,
multiplications and divisions (no fused ones, and no library logarithm, which every device rounds
in its own way). So its bits do not depend on the device, nor on the rows or the shard computed
beside it. This file knows nothing of logits or requests.

Shapes: S rows, V tokens.

Sources: keys by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; constants of
Stafford's variant 13); tokens by lowbias32 (Wellons, "hash-prospector", 2018).
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


def _int32(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device="cpu")


def _float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


# Constants are tensors because torch wraps a Python number anew at every use, which doubles the
# price of an operation on one row. Zero-dimensional ones go with tensors of any device.
_LOWBIAS_1 = _int32(0x7FEB352D)
_LOWBIAS_2 = _int32(0x846CA68B - (1 << 32))
_SHIFT_15, _MASK_15 = _int32(15), _int32((1 << 17) - 1)
_SHIFT_16, _MASK_16 = _int32(16), _int32((1 << 16) - 1)
_ONE, _TWO, _HALF = _float32(1.0), _float32(2.0), _float32(0.5)
_PER_2_32 = _float32(2.0**-32)
_SQRT_HALF_BITS = _int32(0x3F3504F3)  # the float32 nearest to the square root of 1/2
_EXPONENT_BITS = _int32(-(1 << 23))
_LN2_PER_EXPONENT_BIT = _float32(0.6931471805599453 / (1 << 23))
# 2 artanh(s) / s = 2 + a s^2 + b s^4 within 3e-7 for |s| <= 0.1716: a minimax fit of our own.
_ARTANH_3, _ARTANH_5 = _float32(0.666556), _float32(0.41202915)


class Stream(IntEnum):
    """What a number is used for; different streams are independent."""

    CHOICE = 0
    """The verifier's choice, and the coupled draft of it."""
    ACCEPT = 1
    """The coin of rejection sampling."""
    DRAFT = 2
    """Drafts of rejection sampling, at depth 0; depth d is stream DRAFT + d."""


def noise_key(seed: int, position: int, stream: int = Stream.CHOICE) -> int:
    """64 well-mixed bits for one row; any Python integers will do."""
    key = _mix_64(seed)
    key = _mix_64(key + position)
    return _mix_64(key + stream)


def gumbel(keys: Sequence[int], ids_V: Tensor) -> Tensor:
    """[S, V] float32 draws of the standard Gumbel distribution, one row per key of `noise_key`.

    Made from 32-bit uniforms u as -log(-log(u)): values lie in [-3.13, 22.88], and the upper tail,
    which decides who wins an argmax, has float32's full relative resolution.
    """
    return _neg_log(_exponential(_hash(keys, ids_V)))


def uniform(key: int) -> float:
    """One number strictly between 0 and 1, from a key of `noise_key`."""
    return ((key >> 12) + 0.5) * 2.0**-52


def _mix_64(x: int) -> int:
    x = (x + _GOLDEN_64) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _hash(keys: Sequence[int], ids_V: Tensor) -> Tensor:
    """[S, V] uniform 32-bit integers: a bijection of the token id, chosen by the row's 64 bits.

    lowbias32 with half of the row's key before each of its two multiplications; the key is well
    mixed, and with a key of zero this is lowbias32 itself.
    """
    halves_S2 = torch.from_numpy(np.array(keys, dtype="<u8").view("<i4").reshape(-1, 2))
    first_S1, second_S1 = halves_S2.to(ids_V.device).tensor_split(2, dim=1)
    x_V = ids_V.to(torch.int32)
    x_SV = _xor_shifted(x_V, _SHIFT_16, _MASK_16) ^ first_S1
    x_SV = _xor_shifted(x_SV.mul_(_LOWBIAS_1), _SHIFT_15, _MASK_15).add_(second_S1)
    return _xor_shifted(x_SV.mul_(_LOWBIAS_2), _SHIFT_16, _MASK_16)


def _xor_shifted(x: Tensor, num_bits: Tensor, mask: Tensor) -> Tensor:
    """x ^ (x >>> num_bits); torch shifts int32 with its sign, which the mask removes."""
    return (x >> num_bits).bitwise_and_(mask).bitwise_xor_(x)


def _exponential(h: Tensor) -> Tensor:
    """-log(u) for u = 1 - (h + 1/2) / 2^32, h read as unsigned; precise at both ends.

    With y = (h + 1/2) / 2^32 and h read as *signed*, u is 1 - y for y > 0 and -y for y < 0, so
    that the small one of u and 1 - u is always at hand unrounded.
    """
    y = h.float().add_(_HALF).mul_(_PER_2_32)
    one_or_zero = y.ceil()
    u = one_or_zero - y
    lost = one_or_zero.sub_(u).sub_(y)  # what rounding took from u: log(u + lost) = log(u) + lost
    return _neg_log(u).sub_(lost)


def _neg_log(x: Tensor) -> Tensor:
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
