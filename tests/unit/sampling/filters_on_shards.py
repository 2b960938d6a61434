"""Filters on shards of a vocabulary, on ranks that are threads, and on whole, sorted rows.

Shapes: R rows, V columns of a vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eesd_dist.sampling.best_scores import NUM_BEST, needs_best
from eesd_dist.sampling.elementary import mass_of
from eesd_dist.sampling.filters import filtered
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.score_search import NUM_SEARCH_EXCHANGES, NUM_SEARCH_WEIGHTS
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.thread_group import ThreadGroup
from tests.support.thread_ranks import on_ranks


@dataclass(slots=True)
class CountedGroup:
    """A rank's view of a group that counts its gathers."""

    group: TensorGroup
    num_exchanges: int = 0
    num_bytes: int = 0
    """Gathered, this rank's own part included."""

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.num_exchanges += 1
        self.num_bytes += x.nbytes * self.size
        return self.group.all_gather(x)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return self.group.broadcast(x, source=source)


@dataclass(frozen=True, slots=True)
class OnShards:
    """What the ranks keep of all columns, and what rank 0 gathered for it."""

    filtered_RV: Tensor
    num_exchanges: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterTraffic:
    """Upper bound of what the filters of one round exchange."""

    num_exchanges: int
    num_bytes: int
    """Gathered by each rank, its own part included."""


def most_traffic(rules: Sequence[RowRule], *, num_ranks: int) -> FilterTraffic:
    """Returns the bound for these rows, whatever their scores and the size of the vocabulary.

    Joining the rows would gather 4 bytes for each of their tokens.
    """
    filtered_rules = [rule for rule in rules if rule.params.is_filtered]
    if num_ranks == 1 or not filtered_rules:
        return FilterTraffic(num_exchanges=0, num_bytes=0)
    num_nuclei = sum(rule.params.top_p < 1.0 for rule in filtered_rules)
    num_large_k = sum(rule.params.top_k > NUM_BEST for rule in filtered_rules)
    num_best = NUM_BEST if any(map(needs_best, filtered_rules)) else 1
    bytes_of_rank = (
        4 * (num_best + 1) * len(filtered_rules)
        + 4 * NUM_SEARCH_WEIGHTS * num_large_k
        + 8 * (2 + NUM_SEARCH_WEIGHTS) * num_nuclei
    )
    return FilterTraffic(
        num_exchanges=1
        + (NUM_SEARCH_EXCHANGES if num_large_k else 0)
        + (1 + NUM_SEARCH_EXCHANGES if num_nuclei else 0),
        num_bytes=num_ranks * bytes_of_rank,
    )


def filtered_on_shards(
    scores_RV: Tensor, rules: Sequence[RowRule], cuts: Sequence[int]
) -> OnShards:
    """Filters on one rank for each part between `cuts`, which begin with 0 and end with V."""
    shards = [scores_RV[:, start:stop] for start, stop in pairwise(cuts)]

    def on_rank(group: ThreadGroup) -> tuple[Tensor, CountedGroup]:
        torch.set_num_threads(1)
        counting_group = CountedGroup(group)
        return filtered(shards[group.rank], rules, group=counting_group), counting_group

    rank_results = on_ranks(len(shards), on_rank)
    filtered_RV = torch.cat([shard_RV for shard_RV, _ in rank_results], dim=-1)
    return OnShards(filtered_RV, rank_results[0][1].num_exchanges, rank_results[0][1].num_bytes)


def filtered_by_sorting(scores_RV: Tensor, rules: Sequence[RowRule]) -> Tensor:
    """Filters whole rows: sorts each, and keeps its tokens one after the other."""
    num_columns = scores_RV.shape[-1]
    ranked = scores_RV.sort(dim=-1, descending=True, stable=True)
    filtered_RV = torch.full_like(scores_RV, -torch.inf)
    for row, rule in enumerate(rules):
        scores_V, ids_V = ranked.values[row], ranked.indices[row]
        size = num_columns
        if rule.params.top_k > 0:
            size = int((scores_V >= scores_V[min(rule.params.top_k, num_columns) - 1]).sum())
        if rule.params.top_p < 1.0:
            mass_V = mass_of(scores_V[:size] - scores_V[0]).cumsum(0)
            target = math.ceil(rule.params.top_p * float(mass_V[-1]))
            size = min(size, 1 + int((mass_V < target).sum()))
        if rule.params.min_p > 0.0:
            lowest = scores_V[0] + torch.tensor(math.log(rule.params.min_p))
            size = min(size, int((scores_V >= lowest).sum()))
        filtered_RV[row, ids_V[:size]] = scores_V[:size]
    return filtered_RV
