"""Elementary functions of single IEEE operations, compared with those of Python."""

import math

import pytest
import torch
from torch import Tensor

from eesd_dist.sampling.elementary import MASS_BITS, mass_of, neg_log
from eesd_dist.sampling.processors import VocabularyShard, processed
from eesd_dist.types import SamplingParams
from tests.unit.sampling.rows_and_odds import rule


def test_the_logarithm_is_right_to_a_unit_in_the_last_place() -> None:
    x = torch.cat([torch.logspace(-37, 0, 20_001), torch.linspace(0.5, 1.0, 20_001)])
    expected = torch.tensor([-math.log(value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(neg_log(x).double(), expected, rtol=3e-7, atol=1e-7)


def test_masses_are_the_exponential_in_units_rounded_down() -> None:
    x = -torch.linspace(0.0, 27.0, 40_001)
    exact = torch.tensor([math.exp(value) for value in x.tolist()], dtype=torch.float64)
    masses = mass_of(x)
    assert masses.dtype == torch.int64
    assert bool(((masses.double() - exact * 2**MASS_BITS).abs() <= 3e-6 * masses + 1).all())
    ends = mass_of(torch.tensor([0.0, -27.8, -1e30, -torch.inf])).tolist()
    assert ends == [2**MASS_BITS, 0, 0, 0]


def test_masses_fall_with_their_logits() -> None:
    x = torch.linspace(-28.0, 0.0, 200_001)
    assert bool((mass_of(x).diff() >= 0).all())


def nucleus(logits_V: Tensor, top_p: float) -> list[int]:
    params = SamplingParams(temperature=1.0, top_p=top_p)
    columns = VocabularyShard(start=0, size=len(logits_V))
    scores_V = processed(logits_V.unsqueeze(0), [rule(params)], columns)[0]
    return torch.nonzero(scores_V.isfinite()).flatten().tolist()


def nucleus_from_shards(logits_V: Tensor, top_p: float, cuts: list[int]) -> list[int]:
    """Needs no sort over the vocabulary: each shard gives the mass above a threshold, and the
    highest threshold with enough mass is found from the sums."""
    shards = logits_V.tensor_split(cuts)
    largest = max(float(shard.max()) for shard in shards)
    masses = [mass_of(shard - largest) for shard in shards]
    total = sum(int(mass.sum()) for mass in masses)
    enough = math.ceil(top_p * float(total))
    for threshold in sorted(set(logits_V.tolist()), reverse=True):
        mass_above = sum(
            int(mass[s >= threshold].sum()) for s, mass in zip(shards, masses, strict=True)
        )
        if mass_above >= enough:
            break
    return torch.nonzero(logits_V >= threshold).flatten().tolist()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_shards_find_the_nucleus_of_the_whole_vocabulary(seed: int, top_p: float) -> None:
    logits_V = 4.0 * torch.randn(501, generator=torch.Generator().manual_seed(seed))
    nucleus_ids = nucleus(logits_V, top_p)
    assert nucleus_ids == nucleus_from_shards(logits_V, top_p, cuts=[7, 190])
    assert nucleus_ids == nucleus_from_shards(logits_V, top_p, cuts=[64, 128, 129, 400])


def test_a_flat_vocabulary_of_128k_keeps_exactly_its_share() -> None:
    logits_V = torch.zeros(131_072)
    assert nucleus(logits_V, 0.5) == list(range(65_536))
    assert nucleus(logits_V, 1.0) == list(range(131_072))


def test_a_row_without_top_p_keeps_tokens_of_no_mass_next_to_one_that_cuts() -> None:
    logits_2V = torch.tensor([[0.0, -60.0, -1.0], [0.0, -60.0, -1.0]])
    rules = [rule(SamplingParams(top_p=0.5)), rule(SamplingParams(top_k=3))]
    scores = processed(logits_2V, rules, VocabularyShard(start=0, size=3))
    assert scores.isfinite().tolist() == [[True, False, False], [True, True, True]]
