"""The noise is Gumbel, independent for different keys, and the same on every device and shard."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from eesd_dist.backends.cpu.kernels.choice import _neg_log
from eesd_dist.sampling.elementary import neg_log
from eesd_dist.sampling.noise import (
    Stream,
    _mix_64,
    exponential,
    gumbel,
    gumbel_by_steps,
    hash_ids,
    noise_key,
    uniform,
)
from tests.unit.sampling.noise_survey import LAGS, LIMIT, XORS, survey

EULER = 0.5772156649015329
MASK_32 = (1 << 32) - 1


def triple32(x: int) -> int:
    """The published hash in Python integers."""
    x ^= x >> 17
    x = x * 0xED5AD4BB & MASK_32
    x ^= x >> 11
    x = x * 0xAC4C1B51 & MASK_32
    x ^= x >> 15
    x = x * 0x31848BAB & MASK_32
    return x ^ (x >> 14)


def keyed_hash(x: int, first: int, second: int, third: int) -> int:
    x = (x ^ first) * 0xED5AD4BB & MASK_32
    x = ((x ^ (x >> 11)) + second) * 0xAC4C1B51 & MASK_32
    x = ((x ^ (x >> 15)) ^ third) * 0x31848BAB & MASK_32
    return x ^ (x >> 14)


def noise_of(seed: int, positions: range, num_ids: int) -> Tensor:
    return gumbel([noise_key(seed, position) for position in positions], torch.arange(num_ids))


def test_the_hash_is_triple32_when_the_key_words_are_zero() -> None:
    for x in (0, 1, 2, 65_535, 65_536, 131_071):
        assert keyed_hash(x, 0, 0, 0) == triple32(x)


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32, 2**63, 2**64 - 1, noise_key(3, 5)])
def test_the_hash_is_that_of_plain_integers_for_any_key(key: int) -> None:
    ids = [*range(257), 128_255, 2**17, 2**31 - 1]
    hashed = (hash_ids([key], torch.tensor(ids)).long() & MASK_32).squeeze(0).tolist()
    words = (key & MASK_32, key >> 32, _mix_64(key) & MASK_32)
    assert hashed == [keyed_hash(x, *words) for x in ids]


def lowbias32_hash(keys: Sequence[int], ids_V: Tensor) -> Tensor:
    """Two rounds with a key half before each: the first hash of this project."""
    key_S1 = torch.tensor([[key & MASK_32] for key in keys])
    high_S1 = torch.tensor([[key >> 32] for key in keys])
    x_SV = ids_V.long() ^ (ids_V.long() >> 16) ^ key_S1
    x_SV = x_SV * 0x7FEB352D & MASK_32
    x_SV = (x_SV ^ (x_SV >> 15)) + high_S1
    x_SV = (x_SV & MASK_32) * 0x846CA68B & MASK_32
    x_SV = x_SV ^ (x_SV >> 16)
    return torch.where(x_SV > 2**31 - 1, x_SV - 2**32, x_SV).int()


KNOWN_BAD = (40_960, 24_576, 33_280, 17_408, 34_816, 69_633, 8_704, 6)
"""Differences for which two rounds are dependent, by 16 to 100 standard deviations."""
ONE_BIT = tuple(1 << bit for bit in range(17))


def test_two_tokens_are_independent_whatever_single_bit_their_ids_differ_in() -> None:
    statistics = survey((*ONE_BIT, *KNOWN_BAD), num_draws=1_500_000, seed=0)
    assert statistics.worst < LIMIT, statistics.as_json()


def test_the_survey_finds_a_hash_of_two_rounds_out() -> None:
    statistics = survey(KNOWN_BAD, num_draws=1_000_000, seed=0, hashed=lowbias32_hash)
    assert statistics.worst > LIMIT
    assert float(statistics.z_X["lowest 4 bits"].abs().max()) > 20.0


def test_tokens_a_few_ids_apart_are_independent() -> None:
    statistics = survey((1, 2, 3, 4, 5, 7, 16, 64, 1_023), num_draws=500_000, seed=1, is_lag=True)
    assert statistics.worst < LIMIT, statistics.as_json()


@pytest.mark.slow
def test_two_tokens_are_independent_whatever_their_ids_differ_in() -> None:
    statistics = survey(XORS, num_draws=10_000_000, seed=2)
    assert statistics.worst < LIMIT, statistics.as_json()
    statistics = survey(LAGS, num_draws=10_000_000, seed=3, is_lag=True)
    assert statistics.worst < LIMIT, statistics.as_json()


def test_the_noise_is_minus_log_minus_log_of_the_hash_at_both_ends_and_between() -> None:
    h = torch.arange(-(2**31), 2**31, 99_991).to(torch.int32)
    ends = torch.arange(-3_000, 3_000, dtype=torch.int32)
    h = torch.cat([h, ends, torch.tensor([2**31 - 1], dtype=torch.int32)])
    u = 1.0 - ((h.long() & MASK_32).double() + 0.5) / 2**32
    minus_log_u = -torch.log1p(u - 1.0)
    torch.testing.assert_close(exponential(h).double(), minus_log_u, rtol=6e-7, atol=0.0)


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


def test_a_shard_makes_its_own_slice_and_a_row_is_the_same_with_any_others() -> None:
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
    assert hash_ids([noise_key(42, 7)], torch.arange(4)).tolist() == [
        [-420671277, -375390893, -1813978165, 1751740186]
    ]


def test_coins_are_uniform_and_strictly_inside_the_interval() -> None:
    coins = torch.tensor(
        [uniform(noise_key(3, position, Stream.ACCEPT)) for position in range(20_000)]
    )
    assert uniform(0) > 0.0
    assert uniform(2**64 - 1) < 1.0
    counts = torch.histc(coins, bins=20, min=0.0, max=1.0)
    assert float(((counts - 1_000) ** 2 / 1_000).sum()) < 50  # 19 degrees of freedom: p = 1e-4


def test_the_compiled_rule_has_the_bits_of_its_steps() -> None:
    keys = [noise_key(seed, position) for seed in (0, 7, -1, 2**63) for position in (0, 900)]
    for ids_V in (torch.arange(100_000), torch.arange(7), 2**31 - 1 - torch.arange(1001) * 7919):
        compiled_SV, steps_SV = gumbel(keys, ids_V), gumbel_by_steps(keys, ids_V)
        assert torch.equal(compiled_SV.view(torch.int32), steps_SV.view(torch.int32))
    exponents = torch.arange(-126, 128)
    x = torch.cat([2.0**exponents, torch.nextafter(torch.ones(1), torch.zeros(1))]).float()
    numbers = x.clone().numpy()
    _neg_log(numbers, np.empty(len(x), np.int32), np.empty(len(x), np.int32))
    assert torch.equal(torch.from_numpy(numbers), neg_log(x))
