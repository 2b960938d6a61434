"""Sums in the memory of other ranks: their bits, their launches in a row, and their end."""

import threading
import time

import pytest
import torch
from torch import Tensor

from eesd_dist.transport import counts
from eesd_dist.transport.rank_sums import pairwise_sum
from eesd_dist.transport.symmetric import sums
from eesd_dist.transport.symmetric.kernel import PROGRAMS
from eesd_dist.transport.symmetric.sums import SymmetricSums, sum_of_gathered
from tests.unit.transport.symmetric_ranks import host_memory, run_symmetric, sums_of


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(size)]


def sum_and_gather(own: SymmetricSums, rank: int, size: int) -> None:
    """Sums of several sizes in a row, the longest in several launches."""
    shapes = [(3, 5), (700,), (1100,)]
    for turn, shape in enumerate(shapes):
        dtype = (torch.float32, torch.float16)[turn % 2]
        summands = numbers(turn, shape, dtype, size)
        expected = pairwise_sum(summands)
        assert torch.equal(own.sum(summands[rank]), expected), f"another sum {turn}"
    row = numbers(0, (3, 5), torch.float32, size)[rank][1:2]
    assert torch.equal(own.sum(row), pairwise_sum(numbers(0, (3, 5), torch.float32, size))[1:2])
    x = torch.arange(6).view(2, 3) + 10 * rank
    assert torch.equal(own.gather(x), torch.stack([x - 10 * rank + 10 * r for r in range(size)]))


def test_two_ranks_sum_and_gather() -> None:
    run_symmetric(sum_and_gather, 2)


@pytest.mark.parametrize("size", [3, 6, 8])
@pytest.mark.parametrize(
    ("shape", "dtype", "in_shares"),
    [
        ((3, 5), torch.float32, True),
        ((700,), torch.float16, True),
        ((1100,), torch.float32, True),
        ((700,), torch.float32, False),
    ],
)
def test_ranks_have_the_same_bits_whether_each_sums_all_or_a_share(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    in_shares: bool,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks run one after the other, with all signals set, so that none waits. Their memory
    has all numbers after a turn, and all shares after another one."""
    if in_shares:
        monkeypatch.setattr(sums, "WHOLE_BYTES", 16)
    monkeypatch.setattr(sums, "PROGRAMS", 2)
    memories = host_memory(size)
    for memory in memories:
        memory.view(torch.int32)[: 2 * 2 * size] = 2**30
    ranks = [sums_of(memories, rank) for rank in range(size)]
    summands = numbers(1, shape, dtype, size)
    for _ in range(3):
        totals = []
        for own, x in zip(ranks, summands, strict=True):
            own._counts.zero_()
            totals.append(own.sum(x))
    expected = pairwise_sum(summands)
    for rank, total in enumerate(totals):
        assert torch.equal(total, expected), f"another sum of rank {rank}"


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (5000,)])
def test_gathered_numbers_are_summed_in_one_launch(shape: tuple[int, ...], size: int) -> None:
    for dtype in (torch.float32, torch.float16):
        summands = numbers(2, shape, dtype, size)
        x_GN = torch.stack(summands).view(size, -1)
        assert torch.equal(sum_of_gathered(x_GN, dtype).view(shape), pairwise_sum(summands))


def test_a_nodes_part_of_a_sum_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks run one after the other, as above."""
    monkeypatch.setattr(sums, "PROGRAMS", 2)
    summands = numbers(1, (700,), torch.float16, 4)
    node_sums = []
    for node in (summands[:2], summands[2:]):
        memories = host_memory(2)
        for memory in memories:
            memory.view(torch.int32)[: 2 * 2 * 2] = 2**30
        ranks = [sums_of(memories, rank) for rank in range(2)]
        for _ in range(2):
            for own, x in zip(ranks, node, strict=True):
                own._counts.zero_()
                sum_N = own.sum(x, dtype=torch.float32)
        assert torch.equal(sum_N, pairwise_sum([x.float() for x in node]))
        node_sums.append(sum_N)
    total = sum_of_gathered(torch.stack(node_sums), torch.float16)
    assert torch.equal(total, pairwise_sum(summands))


def test_an_abort_ends_a_wait_and_every_sum_after_it() -> None:
    own = sums_of(host_memory(2), 0)
    aborting = threading.Timer(0.5, own.abort)
    aborting.start()
    started_s = time.monotonic()
    own.sum(torch.ones(5))
    assert time.monotonic() - started_s > 0.3
    own.sum(torch.ones(5))
    own.gather(torch.ones(5))
    assert own._counts.tolist() == [3] * PROGRAMS + [1] * PROGRAMS


def test_counts_wrap_around() -> None:
    """A graph is replayed for days: 2^31 sums are a day and a half of rounds."""
    summands = host_memory(2)
    own = sums_of(summands, 0)
    own._counts[:PROGRAMS] = 2**31 - 1
    signals = summands[0].view(torch.int32)[: 2 * 2 * PROGRAMS]
    signals[:] = -(2**31)
    summands[1][:] = summands[0]
    own.sum(torch.ones(5))
    assert own._counts.tolist() == [-(2**31)] * PROGRAMS + [0] * PROGRAMS


def test_large_and_odd_tensors_keep_another_way() -> None:
    own = sums_of(host_memory(2), 0)
    assert own.fits(torch.zeros(5, dtype=torch.bfloat16))
    assert not own.fits(torch.zeros(5, dtype=torch.int64))
    assert not own.fits(torch.zeros(0))
    assert not own.fits(torch.zeros(9 * sums.CAPACITY // 4))
    assert counts.WHOLE_BYTES < sums.CAPACITY
