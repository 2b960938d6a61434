"""The noise is Gumbel, independent wherever its key differs, and the same wherever it is made."""

import math

import pytest
import torch
from torch import Tensor

from eesd_dist.sampling.noise import (
    Stream,
    _exponential,
    _hash,
    gumbel,
    noise_key,
    uniform,
)

EULER = 0.5772156649015329
MASK_32 = (1 << 32) - 1


def lowbias32(x: int, first: int = 0, second: int = 0) -> int:
    """The published hash in Python's own integers, with the two halves of a key."""
    x = ((x ^ (x >> 16)) ^ first) * 0x7FEB352D & MASK_32
    x = ((x ^ (x >> 15)) + second) * 0x846CA68B & MASK_32
    return x ^ (x >> 16)


def noise_of(seed: int, positions: range, num_ids: int) -> Tensor:
    return gumbel([noise_key(seed, position) for position in positions], torch.arange(num_ids))


def test_the_hash_is_lowbias32_when_the_key_is_zero() -> None:
    ids = [0, 1, 2, 65_535, 65_536, 128_255, 2**31 - 1]
    hashed = (_hash([0], torch.tensor(ids)).long() & MASK_32).squeeze(0).tolist()
    assert hashed == [lowbias32(x) for x in ids]


@pytest.mark.parametrize("key", [1, 2**31, 2**32, 2**63, 2**64 - 1, noise_key(3, 5)])
def test_the_hash_is_that_of_plain_integers_for_any_key(key: int) -> None:
    ids = range(257)
    hashed = (_hash([key], torch.arange(257)).long() & MASK_32).squeeze(0).tolist()
    assert hashed == [lowbias32(x, key & MASK_32, key >> 32) for x in ids]


def test_the_noise_is_minus_log_minus_log_of_the_hash_at_both_ends_and_between() -> None:
    h = torch.arange(-(2**31), 2**31, 99_991).to(torch.int32)
    near_the_ends = torch.arange(-3_000, 3_000, dtype=torch.int32)
    h = torch.cat([h, near_the_ends, torch.tensor([2**31 - 1], dtype=torch.int32)])
    u = 1.0 - ((h.long() & MASK_32).double() + 0.5) / 2**32
    minus_log_u = -torch.log1p(u - 1.0)
    torch.testing.assert_close(_exponential(h).double(), minus_log_u, rtol=6e-7, atol=0.0)


def test_the_noise_has_the_moments_and_quantiles_of_a_gumbel() -> None:
    draws = noise_of(11, range(250), 4_000).double().flatten()
    assert abs(float(draws.mean()) - EULER) < 5 * math.pi / math.sqrt(6 * len(draws))
    assert abs(float(draws.var()) - math.pi**2 / 6) < 0.01
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        expected = -math.log(-math.log(quantile))
        below = float((draws < expected).double().mean())
        assert abs(below - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / len(draws))


def test_noise_is_uncorrelated_between_ids_positions_seeds_and_streams() -> None:
    base = noise_of(1, range(100), 4_000)
    others = {
        "next id": noise_of(1, range(100), 4_001)[:, 1:],
        "id 16 on": noise_of(1, range(100), 4_016)[:, 16:],
        "id 1024 on": noise_of(1, range(100), 5_024)[:, 1_024:],
        "next position": noise_of(1, range(1, 101), 4_000),
        "next seed": noise_of(2, range(100), 4_000),
        "far seed": noise_of(1 + 2**32, range(100), 4_000),
        "another stream": gumbel(
            [noise_key(1, p, Stream.DRAFT) for p in range(100)], torch.arange(4_000)
        ),
    }
    bound = 5 / math.sqrt(base.numel())
    for name, other in others.items():
        pair = torch.stack([base.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < bound, name


def test_the_winner_of_one_position_says_nothing_of_the_winner_of_the_next() -> None:
    winners = noise_of(5, range(100_001), 8).argmax(dim=-1)
    pairs = torch.bincount(winners[:-1] * 8 + winners[1:], minlength=64).double()
    expected = 100_000 / 64
    statistic = ((pairs - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor(63 / 2, dtype=torch.float64), statistic / 2)
    assert float(p_value) > 1e-4


def test_a_shard_makes_its_own_slice_and_a_row_is_the_same_beside_any_others() -> None:
    keys = [noise_key(9, position) for position in range(5)]
    whole = gumbel(keys, torch.arange(1_003))
    assert torch.equal(gumbel(keys, torch.arange(500, 1_003)), whole[:, 500:])
    assert torch.equal(gumbel(keys[3:4], torch.arange(7, 40)), whole[3:4, 7:40])
    scattered = torch.tensor([1_002, 3, 77])
    assert torch.equal(gumbel(keys, scattered), whole[:, scattered])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_64_bit_seed_makes_finite_noise(seed: int) -> None:
    assert bool(noise_of(seed, range(3), 1_000).isfinite().all())


def test_signed_and_unsigned_readings_of_a_seed_are_one_seed() -> None:
    assert noise_key(-1, 4) == noise_key(2**64 - 1, 4)


def test_the_noise_of_today_is_the_noise_of_yesterday() -> None:
    """A resumed request continues with the same tokens only while these numbers stand."""
    assert noise_key(42, 7) == 0x149E5012006C4A4A
    assert _hash([noise_key(42, 7)], torch.arange(4)).tolist() == [
        [190376500, -718693417, -1233527834, -624783831]
    ]


def test_coins_are_uniform_and_strictly_inside_the_interval() -> None:
    coins = torch.tensor(
        [uniform(noise_key(3, position, Stream.ACCEPT)) for position in range(20_000)]
    )
    assert uniform(0) > 0.0
    assert uniform(2**64 - 1) < 1.0
    counts = torch.histc(coins, bins=20, min=0.0, max=1.0)
    assert float(((counts - 1_000) ** 2 / 1_000).sum()) < 50  # 19 degrees of freedom: p = 1e-4


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits() -> None:
    keys = [noise_key(13, position) for position in range(16)]
    on_gpu = gumbel(keys, torch.arange(128_256, device="cuda")).cpu()
    assert torch.equal(on_gpu, gumbel(keys, torch.arange(128_256)))
