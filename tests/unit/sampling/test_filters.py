"""Filters keep the same tokens on any sharding as a slow implementation on whole rows."""

import math
from random import Random

import pytest
import torch
from torch import Tensor

from eesd_dist.model.parallel import rank_range
from eesd_dist.sampling import best_scores, filters, nucleus
from eesd_dist.sampling.elementary import mass_of
from eesd_dist.sampling.filters import filtered
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.score_search import search
from eesd_dist.sampling.sharded_rows import ShardedRows
from eesd_dist.types import SamplingParams
from tests.support.fake_cuda import GPU, HostCopies, fake_cuda
from tests.unit.sampling.filters_on_shards import (
    FilterTraffic,
    filtered_by_sorting,
    filtered_on_shards,
    most_traffic,
)
from tests.unit.sampling.rows_and_odds import rule

WIDE = 128 * 1024


def filtered_slowly(scores_V: Tensor, row: RowRule) -> Tensor:
    """Filters one whole row with Python integers, token by token in the order of the scores."""
    scores = scores_V.tolist()
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    survivors = order
    if row.params.top_k > 0:
        kth = scores[order[min(row.params.top_k, len(order)) - 1]]
        survivors = [token for token in order if scores[token] >= kth]
    if row.params.top_p < 1.0:
        masses = mass_of(scores_V[survivors] - scores_V[order[0]]).tolist()
        target = math.ceil(row.params.top_p * float(sum(masses)))
        size, mass = 1, masses[0]
        while mass < target and size < len(survivors):
            mass += masses[size]
            size += 1
        survivors = survivors[:size]
    if row.params.min_p > 0.0:
        lowest = float(scores_V[order[0]] + torch.tensor(math.log(row.params.min_p)))
        survivors = [token for token in survivors if scores[token] >= lowest]
    result_V = torch.full_like(scores_V, -torch.inf)
    result_V[survivors] = scores_V[survivors]
    return result_V


def even_cuts(num_columns: int, num_ranks: int) -> list[int]:
    return [rank_range(num_columns, rank, num_ranks).start for rank in range(num_ranks)] + [
        num_columns
    ]


def random_scores(rng: Random, num_rows: int, num_columns: int) -> Tensor:
    """Returns sharp, flat, constant and tied rows, some of them with impossible tokens."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    scores_RV = torch.randn(num_rows, num_columns, generator=generator)
    scores_RV *= rng.choice([0.0, 0.001, 0.3, 1.0, 4.0, 20.0])
    grid = rng.choice([None, 1.0, 0.25])
    if grid is not None:
        scores_RV = (scores_RV / grid).round() * grid  # with both zeros
    share = rng.choice([0.0, 0.0, 0.2, 0.9])
    impossible_RV = torch.rand(num_rows, num_columns, generator=generator) < share
    impossible_RV[:, rng.randrange(num_columns)] = False
    return scores_RV.masked_fill(impossible_RV, -torch.inf)


def random_rule(rng: Random) -> RowRule:
    params = SamplingParams(
        top_p=rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2**-30, 1 - 2**-53, 1.0]),
        top_k=rng.choice([0, 0, 1, 5, 64, 127, 128, 129, 700, 10**6]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
    )
    return rule(params) if rule(params).params.is_filtered else random_rule(rng)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_shards_keep_what_the_slow_twin_keeps_of_whole_rows(num_ranks: int, seed: int) -> None:
    rng = Random(f"{seed} {num_ranks}")
    for num_columns in (1, 7, 128, 129, 300, 700, 3_000):
        rules = [random_rule(rng) for _ in range(4)]
        scores_RV = random_scores(rng, len(rules), num_columns)
        inner = sorted(rng.randrange(num_columns + 1) for _ in range(num_ranks - 1))
        on_shards = filtered_on_shards(scores_RV, rules, [0, *inner, num_columns])
        for row, row_rule in enumerate(rules):
            assert torch.equal(
                on_shards.filtered_RV[row], filtered_slowly(scores_RV[row], row_rule)
            )
        limit = most_traffic(rules, num_ranks=num_ranks)
        assert on_shards.num_exchanges <= limit.num_exchanges
        assert on_shards.num_bytes <= limit.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("num_columns", [4_096, 32_000, WIDE])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_shards_of_wide_vocabularies_keep_what_sorted_rows_keep(
    num_ranks: int, num_columns: int
) -> None:
    rng = Random(f"{num_ranks} {num_columns}")
    for _ in range(200 * 4_096 // num_columns):
        rules = [random_rule(rng) for _ in range(16)]
        scores_RV = random_scores(rng, len(rules), num_columns)
        inner = sorted(rng.randrange(num_columns + 1) for _ in range(num_ranks - 1))
        filtered_RV = filtered_on_shards(scores_RV, rules, [0, *inner, num_columns]).filtered_RV
        assert torch.equal(filtered_RV, filtered_by_sorting(scores_RV, rules))


@pytest.mark.parametrize("num_columns", [300, 20_000])
def test_a_rank_with_whole_rows_keeps_the_same_however_it_finds_them(num_columns: int) -> None:
    """Narrow rows are sorted, wide ones are searched."""
    rng = Random(num_columns)
    for _ in range(12):
        row = random_rule(rng)
        scores_RV = random_scores(rng, 1, num_columns)
        filtered_RV = filtered(scores_RV, [row])
        assert torch.equal(filtered_RV[0], filtered_slowly(scores_RV[0], row))


@pytest.mark.parametrize("cuts", [[0, WIDE], [0, 1, 9, 70_000, WIDE], [0, 0, 65_536, WIDE, WIDE]])
def test_uniform_logits_keep_the_first_ids_for_every_top_p(cuts: list[int]) -> None:
    top_p = [0.0, 1e-9, 0.25, 0.5, 0.9, 0.95, 0.999_999, 1 - 2**-30]
    rules = [rule(SamplingParams(top_p=p)) for p in top_p]
    on_shards = filtered_on_shards(torch.zeros(len(rules), WIDE), rules, cuts)
    for p, is_finite_V in zip(top_p, on_shards.filtered_RV.isfinite(), strict=True):
        size = max(1, math.ceil(p * WIDE))
        assert bool(is_finite_V[:size].all())
        assert not bool(is_finite_V[size:].any())


def test_flat_rows_of_a_wide_vocabulary_are_those_of_the_slow_twin() -> None:
    scores_RV = 0.5 * torch.randn(3, WIDE, generator=torch.Generator().manual_seed(1))
    scores_RV[1] = scores_RV[1].bfloat16().float()  # many ties
    rules = [
        rule(SamplingParams(top_p=0.95)),
        rule(SamplingParams(top_p=0.5, min_p=0.01)),
        rule(SamplingParams(top_p=0.9, top_k=9_000)),
    ]
    on_shards = filtered_on_shards(scores_RV, rules, even_cuts(WIDE, 3))
    for row, row_rule in enumerate(rules):
        assert torch.equal(on_shards.filtered_RV[row], filtered_slowly(scores_RV[row], row_rule))


SHARP, FLAT, TIED = 20.0, 0.3, 0.0


@pytest.mark.parametrize(
    ("scale", "params", "num_exchanges"),
    [
        (SHARP, SamplingParams(min_p=0.1), 1),
        (FLAT, SamplingParams(top_k=50), 1),
        (FLAT, SamplingParams(top_k=50, top_p=0.9, min_p=0.1), 1),
        (SHARP, SamplingParams(top_p=0.9), 2),
        (TIED, SamplingParams(top_p=0.9), 2),
        (TIED, SamplingParams(top_k=50, top_p=0.9), 2),
        (FLAT, SamplingParams(top_k=500), 5),
        (FLAT, SamplingParams(top_p=0.9), 6),
        (FLAT, SamplingParams(top_k=500, top_p=0.9), 10),
    ],
    ids=str,
)
def test_the_number_of_exchanges_is_fixed_by_the_kind_of_row(
    scale: float, params: SamplingParams, num_exchanges: int
) -> None:
    scores_RV = scale * torch.randn(2, 9_000, generator=torch.Generator().manual_seed(2))
    rules = [rule(params)] * 2
    on_shards = filtered_on_shards(scores_RV, rules, even_cuts(9_000, 2))
    assert on_shards.num_exchanges == num_exchanges
    assert most_traffic(rules, num_ranks=2).num_exchanges >= num_exchanges


def test_bytes_do_not_grow_with_the_vocabulary() -> None:
    """64 requests of 5 rows over 128k tokens: joined rows are 168 MB."""
    rules = [rule(SamplingParams(top_p=0.95))] * 320
    full_rows_bytes = len(rules) * WIDE * 4
    assert most_traffic(rules, num_ranks=2).num_bytes < full_rows_bytes / 28
    assert most_traffic(rules, num_ranks=8).num_bytes < full_rows_bytes / 7
    scores_RV = SHARP * torch.randn(2, WIDE, generator=torch.Generator().manual_seed(3))
    on_shards = filtered_on_shards(scores_RV, rules[:2], even_cuts(WIDE, 2))
    assert on_shards.num_bytes == 2 * 2 * (129 * 4 + 2 * 8)


def test_rows_without_filters_exchange_nothing() -> None:
    rules = [rule(), rule(SamplingParams(temperature=0.0, top_p=0.5))]
    nothing = FilterTraffic(num_exchanges=0, num_bytes=0)
    assert most_traffic(rules, num_ranks=8) == nothing
    filter_rules = [rule(SamplingParams(top_p=0.5))]
    assert most_traffic(filter_rules, num_ranks=1) == nothing


@pytest.mark.parametrize("seed", range(4))
def test_a_search_finds_what_sorting_finds(seed: int) -> None:
    rng = Random(seed)
    scores_RV = random_scores(rng, 6, 500)
    ones_RV = torch.ones_like(scores_RV, dtype=torch.int32)
    target_R1 = torch.tensor([[1], [2], [250], [499], [500], [10_000]])
    edge = search(ShardedRows(scores_RV, [rule()] * 6, None), ones_RV, target_R1)
    sorted_RV = scores_RV.sort(dim=-1, descending=True).values
    assert torch.equal(edge.score_U1, sorted_RV.gather(-1, target_R1.clamp_max(500) - 1) + 0.0)
    assert torch.equal(edge.above_U1, (scores_RV > edge.score_U1).sum(-1, keepdim=True))
    assert torch.equal(edge.equal_GU1[0], (scores_RV == edge.score_U1).sum(-1, keepdim=True))


class _DecisionCounter:
    """Answers every decision that the host waits for with all rows, and counts them."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, claim_R1: Tensor) -> list[int]:
        self.times += 1
        return list(range(claim_R1.shape[0]))


@pytest.mark.parametrize(
    ("params", "num_columns", "num_decisions"),
    [
        (SamplingParams(min_p=0.1), 500, 0),
        (SamplingParams(top_k=5), 500, 0),
        (SamplingParams(top_p=0.9), 500, 1),
        (SamplingParams(top_k=5, top_p=0.9), 20_000, 2),
        (SamplingParams(top_p=0.9), 20_000, 2),
        (SamplingParams(top_k=500, top_p=0.9, min_p=0.1), 20_000, 4),
    ],
    ids=str,
)
def test_a_gpu_waits_for_a_few_decisions_whatever_the_number_of_rows(
    params: SamplingParams, num_columns: int, num_decisions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = _DecisionCounter()
    for module in (best_scores, nucleus, filters):
        monkeypatch.setattr(module, "rows_where", decisions)
    num_operators = set()
    for num_rows in (3, 70):
        with fake_cuda():
            scores_RV = torch.zeros(num_rows, num_columns, device=GPU)
            with HostCopies() as copies, torch.inference_mode():
                filtered_RV = filtered(scores_RV, [rule(params)] * num_rows)
            assert (filtered_RV.device, filtered_RV.shape) == (GPU, scores_RV.shape)
            assert copies.to_the_host == []
        num_operators.add(copies.num_operators)
    assert len(num_operators) == 1
    assert decisions.times == 2 * num_decisions
