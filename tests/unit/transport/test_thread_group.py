"""Ranks in threads: the sums of a process group, and errors that name the missing rank."""

import time

import pytest
import torch

from eesd_dist.errors import PeerLost, WireError
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group_handles import GroupHandle, UnconnectedGroup
from eesd_dist.transport.thread_group import ThreadGroup, command_queues, thread_group
from tests.support.thread_ranks import on_ranks, thread_commands


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_sum_is_taken_in_pairs_and_rounded_once(dtype: torch.dtype, num_ranks: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(7, 33).to(dtype) for _ in range(num_ranks)]
    summands = [x.float() for x in inputs]
    while len(summands) > 1:
        summands = [a + b for a, b in zip(summands[::2], summands[1::2], strict=True)]
    (expected,) = summands
    sums = on_ranks(num_ranks, lambda group: group.all_reduce(inputs[group.rank].clone()))
    assert all(torch.equal(total, expected.to(dtype)) for total in sums)


def test_a_sum_works_in_place_on_a_tensor_with_gaps() -> None:
    inputs = [torch.full((4, 6), float(rank + 1))[:, ::2] for rank in range(3)]
    on_ranks(3, lambda group: group.all_reduce(inputs[group.rank]))
    assert all(torch.equal(x, torch.full((4, 3), 6.0)) for x in inputs)


def test_every_rank_gets_the_same_and_its_own_copy() -> None:
    def work(group: ThreadGroup) -> list[list[float]]:
        contributions = group.all_gather(torch.full((2,), float(group.rank)))
        for contribution in contributions:
            contribution += 0.5
        shared = group.broadcast(torch.full((2,), float(group.rank)), source=1)
        return [*(contribution.tolist() for contribution in contributions), shared.tolist()]

    assert on_ranks(3, work) == [[[0.5] * 2, [1.5] * 2, [2.5] * 2, [1.0] * 2]] * 3


def test_many_collectives_in_a_row_never_mix() -> None:
    def work(group: ThreadGroup) -> list[float]:
        return [
            float(group.all_reduce(torch.tensor([float(turn * (group.rank + 1))]))[0])
            for turn in range(200)
        ]

    assert on_ranks(4, work) == [[10.0 * turn for turn in range(200)]] * 4


def test_a_rank_that_does_not_take_part_is_named() -> None:
    group: TensorGroup = thread_group(3, name="verify", timeout_s=0.05)[1]
    with pytest.raises(PeerLost, match="lost verify rank 0 or verify rank 2 during all_reduce"):
        group.all_reduce(torch.ones(2))


def test_an_aborted_group_wakes_waiting_ranks_and_stays_ended() -> None:
    started_s = time.monotonic()

    def work(group: ThreadGroup) -> str:
        if group.rank == 0:
            group.abort("rank 0 was lost")
        with pytest.raises(PeerLost) as lost:
            group.all_gather(torch.ones(1))
        return lost.value.reason

    assert on_ranks(2, work, timeout_s=60.0) == ["rank 0 was lost"] * 2
    assert time.monotonic() - started_s < 30.0


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    def work(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("a bug of ours")
        group.all_reduce(torch.ones(1))

    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        on_ranks(2, work, timeout_s=60.0)


def test_ranks_that_disagree_about_the_shape_are_told() -> None:
    with pytest.raises(WireError, match="from another rank, expected"):
        on_ranks(2, lambda group: group.all_reduce(torch.ones(2 + group.rank)))


def test_a_rank_keeps_its_weights_from_one_group_to_the_next() -> None:
    first, second = thread_group(1, name="verify")[0], thread_group(1, name="verify")[0]
    latest = GroupHandle(UnconnectedGroup(rank=0, size=1))
    latest.join(first)
    latest.all_gather(torch.ones(3))
    assert latest.counts().by_kind["all_gather"].number == 1
    latest.join(second)
    assert not latest.counts().by_kind


def test_a_command_stream_goes_on_with_the_next_epochs_followers() -> None:
    sink, (old,) = thread_commands(1, timeout_s=0.05)
    sink.join(command_queues(1))
    sink.close()
    with pytest.raises(PeerLost, match="waiting for a command"):
        old.next_command()
