"""Survey of the sampling noise of two tokens: z values of their independence.

The probability of a token depends on pairs of draws: the noise of two ids under one key. Every
count becomes a z value; for independent draws all of them stay below 5.5.

Shapes: S keys, X differences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

import torch
from torch import Tensor

from eesd_dist.sampling.noise import exponential, hash_ids, noise_key

LIMIT = 5.5
"""Limit of |z|: with independent draws 1 in 4,000 runs of some 7,000 counts exceeds it."""

NUM_BITS = 17
XORS = tuple(
    sum(1 << bit for bit in bits)
    for count in (1, 2, 3)
    for bits in combinations(range(NUM_BITS), count)
)
"""Every difference of one to three bits."""

LAGS = (*range(1, 65), *(2**k + d for k in range(7, NUM_BITS) for d in (-1, 0, 1)))

_KEYS_AT_ONCE = 256
_TAIL = 2.0**-5
"""An exponential draw below this is in the tail that wins an argmax."""
_WINS = (0.01, 0.2, 0.5, 0.8)

HashIds = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """z values of every statistic, one per difference."""

    num_draws: int
    differences: tuple[int, ...]
    z_X: Mapping[str, Tensor]

    @property
    def worst(self) -> float:
        return max(float(z_X.abs().max()) for z_X in self.z_X.values())

    def as_json(self) -> dict[str, object]:
        """Returns, per statistic, the root mean square and the three largest differences."""
        return {
            name: {
                "rms": round(float(z_X.square().mean().sqrt()), 3),
                "worst": [
                    [self.differences[at], round(float(z_X[at]), 2)]
                    for at in z_X.abs().argsort(descending=True)[:3].tolist()
                ],
            }
            for name, z_X in self.z_X.items()
        }


def survey(
    differences: Sequence[int],
    *,
    num_draws: int,
    seed: int,
    is_lag: bool = False,
    hashed: HashIds = hash_ids,
) -> Survey:
    """Draws pairs (id, id ^ difference), or (id, id + difference), one key for each draw.

    The pairs of one key share their first id, so that statistics of different differences are
    correlated; each of them still has the distribution it is tested against.
    """
    rng = Random(seed)
    difference_X = torch.tensor(differences)
    counts: dict[str, Tensor] = {}
    num_rounds = -(-num_draws // _KEYS_AT_ONCE)
    for number in range(num_rounds):
        first = rng.randrange(1 << NUM_BITS)
        others_X = first + difference_X if is_lag else first ^ difference_X
        ids = torch.cat([torch.tensor([first]), others_X]).to(torch.int32)
        start = number * _KEYS_AT_ONCE
        keys = [noise_key(seed, start + row) for row in range(_KEYS_AT_ONCE)]
        for name, count_X in _counts(hashed(keys, ids)).items():
            counts[name] = counts.get(name, 0.0) + count_X
    total = num_rounds * _KEYS_AT_ONCE
    return Survey(
        num_draws=total,
        differences=tuple(differences),
        z_X={name: _z(name, count_X, total) for name, count_X in counts.items()},
    )


def _counts(hash_SX: Tensor) -> dict[str, Tensor]:
    """Returns statistics of the first column with each other column, summed over keys."""
    draw_SX = exponential(hash_SX)
    first_S1, others_SX = draw_SX[:, :1], draw_SX[:, 1:]
    # The smaller draw / probability wins.
    counts = {
        f"wins at {p}": (first_S1 * ((1.0 - p) / p) < others_SX).sum(0).double() for p in _WINS
    }
    bits_SX = hash_SX[:, :1] ^ hash_SX[:, 1:]
    counts["lowest bit"] = (bits_SX & 1).sum(0).double()
    counts["lowest 4 bits"] = ((bits_SX & 15) == 0).sum(0).double()
    counts["both in the tail"] = ((first_S1 < _TAIL) & (others_SX < _TAIL)).sum(0).double()
    signed_SX = hash_SX.float()
    counts["correlation"] = (signed_SX[:, :1] * signed_SX[:, 1:]).sum(0, dtype=torch.float64)
    return counts


def _z(name: str, count_X: Tensor, num_draws: int) -> Tensor:
    if name == "correlation":  # of integers that are uniform over 2^32 values around zero
        return count_X / (2.0**64 / 12 * math.sqrt(num_draws))
    p = _probability_of(name)
    return (count_X - num_draws * p) / math.sqrt(num_draws * p * (1.0 - p))


def _probability_of(name: str) -> float:
    if name.startswith("wins at "):
        return float(name.removeprefix("wins at "))
    tail = -math.expm1(-_TAIL)
    return {"lowest bit": 1 / 2, "lowest 4 bits": 1 / 16, "both in the tail": tail * tail}[name]
