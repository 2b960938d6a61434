"""Sums in pairs, over exchanges of real ranks that are threads."""

import pytest
import torch
from torch import Tensor

from eesd_dist.transport.counts import WHOLE_BYTES, bytes_of_sum
from eesd_dist.transport.rank_sums import pairwise_sum, sum_over_ranks
from eesd_dist.transport.thread_group import ThreadGroup
from tests.support.thread_ranks import on_ranks


class ThreadExchange:
    """The transfers of the NCCL plane, between threads; counts the bytes that a rank receives."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group
        self.received_bytes = 0

    def gathered(self, x_N: Tensor) -> Tensor:
        self.received_bytes += x_N.nbytes * (self._group.size - 1)
        return torch.stack(self._group.all_gather(x_N))

    def swapped(self, x_GW: Tensor) -> Tensor:
        self.received_bytes += x_GW.nbytes * (self._group.size - 1) // self._group.size
        return torch.stack(
            [contribution[self._group.rank] for contribution in self._group.all_gather(x_GW)]
        )

    def summed(self, x_GN: Tensor) -> Tensor:
        return pairwise_sum(x_GN.unbind())


def sums(inputs: list[Tensor]) -> tuple[list[Tensor], int]:
    def rank(group: ThreadGroup) -> tuple[Tensor, int]:
        exchange = ThreadExchange(group)
        total = sum_over_ranks(inputs[group.rank], exchange, size=group.size)
        return total, exchange.received_bytes

    results = on_ranks(len(inputs), rank)
    return [total for total, _ in results], results[0][1]


def random_inputs(num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_ranks)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(num_ranks)]


def added_in_pairs(inputs: list[Tensor]) -> Tensor:
    """Returns the sum of at most eight ranks."""
    sums = {rank: x.float() for rank, x in enumerate(inputs)}
    for distance in (1, 2, 4):
        for rank in range(0, len(inputs), 2 * distance):
            if rank + distance in sums:
                sums[rank] = sums[rank] + sums[rank + distance]
    return sums[0].to(inputs[0].dtype)


def one_after_the_other(inputs: list[Tensor]) -> Tensor:
    return sum(inputs[1:], inputs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("num_rows", [1, 16, 1_023])
def test_every_rank_has_the_sum_in_pairs(num_ranks: int, num_rows: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(num_ranks, (num_rows, 193), dtype)
    expected = added_in_pairs(inputs)
    totals, received_bytes = sums(inputs)
    assert all(torch.equal(total, expected) for total in totals)
    padding_bytes = 2 * num_ranks * inputs[0].itemsize
    expected_bytes = bytes_of_sum(inputs[0].nbytes, size=num_ranks)
    assert expected_bytes <= received_bytes <= expected_bytes + padding_bytes


def test_both_ways_are_taken_and_another_order_would_be_seen() -> None:
    small = random_inputs(4, (16, 192), torch.float32)
    large = random_inputs(4, (1_024, 192), torch.float32)
    assert small[0].nbytes < WHOLE_BYTES < large[0].nbytes
    for inputs in (small, large):
        totals, _ = sums(inputs)
        assert not torch.equal(totals[0], one_after_the_other(inputs))
        assert not torch.equal(totals[0], added_in_pairs([inputs[at] for at in (0, 2, 1, 3)]))


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", [5, 8, 16])
def test_a_sum_over_nodes_is_the_sum_of_their_sums(num_ranks: int, per_node: int) -> None:
    inputs = random_inputs(num_ranks, (9, 33), torch.float32)
    nodes = [inputs[first : first + per_node] for first in range(0, num_ranks, per_node)]
    assert torch.equal(pairwise_sum([pairwise_sum(ranks) for ranks in nodes]), pairwise_sum(inputs))


@pytest.mark.parametrize("num_rows", [1, 16, 700])
def test_a_rows_sum_does_not_depend_on_the_other_rows(num_rows: int) -> None:
    inputs = random_inputs(3, (700, 512), torch.bfloat16)
    few_rows, _ = sums([x[:num_rows].contiguous() for x in inputs])
    all_rows, _ = sums(inputs)
    assert torch.equal(few_rows[1], all_rows[2][:num_rows])


def test_a_tensor_with_gaps_is_summed_and_stays_as_it_is() -> None:
    def rank(group: ThreadGroup) -> Tensor:
        x = torch.full((4, 6), float(group.rank + 1))
        total = sum_over_ranks(x[:, ::2], ThreadExchange(group), size=3)
        assert bool((x == group.rank + 1).all())
        return total

    for total in on_ranks(3, rank):
        assert total.tolist() == [[6.0] * 3] * 4
