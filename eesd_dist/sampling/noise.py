"""Reproducible noise: a pure function of (seed, position, stream, token).

The stages of a pipeline, the shards of a vocabulary and a replica that resumes a request need the
same noise without communication. It is computed by hashing, without state, with 32-bit integer
operations and single IEEE float32 operations only. So its bits do not depend on the device, the
batch or the sharding.

Shapes: S rows, V tokens.

Two tokens of one row have ids of a fixed difference, so the hash must decorrelate ids of every
difference: two multiplication rounds do not (docs/exactness.md has the figures), three with a key
word before each do. `tests/unit/sampling/test_noise.py` measures this.

Sources: keys by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; constants of
Stafford's variant 13); tokens by triple32 (Wellons, "hash-prospector", 2018), keyed.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.sampling.backend import sampling_on
from eesd_dist.sampling.elementary import float32, int32, neg_log

_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


NOISE_VERSION = 2
"""Sampled texts differ between versions of the noise."""

_TRIPLE_1 = int32(0xED5AD4BB - (1 << 32))
_TRIPLE_2 = int32(0xAC4C1B51 - (1 << 32))
_TRIPLE_3 = int32(0x31848BAB)
_SHIFT_11, _MASK_11 = int32(11), int32((1 << 21) - 1)
_SHIFT_14, _MASK_14 = int32(14), int32((1 << 18) - 1)
_SHIFT_15, _MASK_15 = int32(15), int32((1 << 17) - 1)
_HALF, _PER_2_32 = float32(0.5), float32(2.0**-32)


class Stream(IntEnum):
    """The purpose of a random number; different streams are independent."""

    CHOICE = 0
    """The verifier's choice, and the coupled draft of it."""
    ACCEPT = 1
    """Acceptance in rejection sampling."""
    DRAFT = 2
    """Drafts of rejection sampling, at depth 0; depth d is stream DRAFT + d."""


def noise_key(seed: int, position: int, stream: int = Stream.CHOICE) -> int:
    """Returns 64 well-mixed bits for one row; arguments may be any Python integers."""
    return _mix_64(_mix_64(mixed_seed(seed) + position) + stream)


def mixed_seed(seed: int) -> int:
    """Returns the part of a `noise_key` that is the same at all positions."""
    return _mix_64(seed)


def gumbel(keys: Sequence[int], ids_V: Tensor) -> Tensor:
    """Returns float32 draws [S, V] of the standard Gumbel distribution, one row per `noise_key`.

    Made from 32-bit uniforms u as -log(-log(u)): values lie in [-3.13, 22.88], and the upper tail,
    which decides an argmax, has float32's full relative resolution.
    """
    return sampling_on(ids_V.device).gumbel(keys, ids_V)


def gumbel_by_steps(keys: Sequence[int], ids_V: Tensor) -> Tensor:
    """Returns `gumbel` with torch's operations, on any device."""
    blocks = sampling_on(ids_V.device).row_blocks((len(keys), len(ids_V)))
    if len(blocks) == 1:
        return neg_log(exponential(hash_ids(keys, ids_V)))
    return torch.cat([neg_log(exponential(hash_ids(keys[block], ids_V))) for block in blocks])


def uniform(key: int) -> float:
    """Returns a number strictly between 0 and 1 from a `noise_key`."""
    return ((key >> 12) + 0.5) * 2.0**-52


def _mix_64(x: int) -> int:
    x = (x + _GOLDEN_64) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def hash_ids(keys: Sequence[int], ids_V: Tensor) -> Tensor:
    """Returns uniform 32-bit integers [S, V]: a bijection of the token id, chosen by the row's 96
    key bits.

    This is triple32 with a key word before each of its three multiplications and without its first
    xor-shift. That changes no id below 2^17, and the key word spreads larger ones as well. With key
    words of zero this equals triple32 for ids below 2^17.
    """
    words_S3 = torch.from_numpy(key_words(keys)).to(ids_V.device)
    first_S1, second_S1, third_S1 = words_S3.tensor_split(3, dim=1)
    x_SV = ids_V.to(torch.int32) ^ first_S1
    x_SV = _xor_shifted(x_SV.mul_(_TRIPLE_1), _SHIFT_11, _MASK_11).add_(second_S1)
    x_SV = _xor_shifted(x_SV.mul_(_TRIPLE_2), _SHIFT_15, _MASK_15).bitwise_xor_(third_S1)
    return _xor_shifted(x_SV.mul_(_TRIPLE_3), _SHIFT_14, _MASK_14)


def key_words(keys: Sequence[int]) -> npt.NDArray[np.int32]:
    """Returns 32-bit words [S, 3]: the halves of each key, and a half of the key mixed again."""
    wide_S2 = np.array([(key, _mix_64(key)) for key in keys], dtype="<u8").reshape(-1, 2)
    return wide_S2.view("<i4")[:, :3]


def _xor_shifted(x: Tensor, num_bits: Tensor, mask: Tensor) -> Tensor:
    """Returns x ^ (x >>> num_bits). torch extends the sign of int32; the mask removes it."""
    return (x >> num_bits).bitwise_and_(mask).bitwise_xor_(x)


def exponential(h: Tensor) -> Tensor:
    """Returns -log(u) for u = 1 - (h + 1/2) / 2^32, h read as unsigned; precise at both ends.

    With y = (h + 1/2) / 2^32 and h read as *signed*, u is 1 - y for y > 0 and -y for y < 0, so
    that the smaller of u and 1 - u is always available unrounded.
    """
    y = h.float().add_(_HALF).mul_(_PER_2_32)
    ceiling = y.ceil()
    u = ceiling - y
    lost = ceiling.sub_(u).sub_(y)  # rounding error of u: log(u + lost) = log(u) + lost
    return neg_log(u).sub_(lost)
