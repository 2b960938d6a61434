"""Sums over the ranks of one host inside of compiled calls, with ranks in threads."""

import ctypes
import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from eesd_dist.errors import PeerLost
from eesd_dist.transport.rank_sums import pairwise_sum
from eesd_dist.transport.sum_layout import MEMORY_BYTES, SLOT_BYTES, TURN
from eesd_dist.transport.thread_group import ThreadGroup, thread_group
from tests.support.host_sum_calls import best, compile_calls, summed
from tests.support.thread_ranks import on_ranks

WIDTH = 192
MORE_THAN_A_SLOT = SLOT_BYTES // (4 * WIDTH) + 7
LATE_S = 10.0
"""Allowed delay of the end of a wait on a busy machine."""


def inputs_of(num_ranks: int, num_rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_ranks)
    return [torch.randn(num_rows, WIDTH, generator=generator) for _ in range(num_ranks)]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 7, MORE_THAN_A_SLOT])
@pytest.mark.parametrize("num_ranks", [2, 3, 8, 13])
def test_a_sum_is_that_of_messages_on_every_rank(
    num_ranks: int, num_rows: int, num_threads: int
) -> None:
    inputs = inputs_of(num_ranks, num_rows)
    expected = pairwise_sum(inputs)

    def work(group: ThreadGroup) -> list[Tensor]:
        return [summed(group, inputs[group.rank], num_threads=num_threads) for _ in range(3)]

    for totals in on_ranks(num_ranks, work):
        assert all(torch.equal(total, expected) for total in totals)


def test_more_ranks_than_sum_in_memory_sum_by_messages() -> None:
    assert thread_group(16)[0].sums_on_host
    assert not thread_group(17)[0].sums_on_host


def test_many_sums_in_a_row_never_mix() -> None:
    def work(group: ThreadGroup) -> list[float]:
        totals = []
        for turn in range(500):
            x_TD = torch.full((1 + turn % 3, 16), float(turn * (group.rank + 1)))
            totals.append(float(summed(group, x_TD)[-1, -1]))
        return totals

    assert on_ranks(4, work) == [[10.0 * turn for turn in range(500)]] * 4


def test_the_best_tokens_of_ranks_are_those_of_all_columns() -> None:
    rng = np.random.default_rng(3)
    num_rows, width, num_ranks = 20_000, 3, 3  # more rows than a slot has room for
    values = np.array([-np.inf, -2.0, -1.0, 0.0, 1.0, 1.5], np.float32)  # many are equal
    scores_SV = values[rng.integers(0, len(values), (num_rows, width * num_ranks))]
    order_SV = np.argsort(-scores_SV, axis=1, kind="stable")
    expected_2S = np.take_along_axis(scores_SV, order_SV[:, :2], axis=1).T

    def work(group: ThreadGroup) -> tuple[list[int], list[list[float]]]:
        first = group.rank * width
        shard_SV = scores_SV[:, first : first + width]
        local_SV = np.argsort(-shard_SV, axis=1, kind="stable")
        local_2S = np.take_along_axis(shard_SV, local_SV[:, :2], axis=1).T
        tokens_S, scores_2S = best(group, (first + local_SV[:, 0]).astype(np.int32), local_2S)
        return tokens_S.tolist(), scores_2S.tolist()

    for tokens, scores in on_ranks(num_ranks, work):
        assert tokens == order_SV[:, 0].tolist()
        assert scores == expected_2S.tolist()


def test_sums_are_counted_with_their_bytes_each_way() -> None:
    def work(group: ThreadGroup) -> tuple[int, int, int]:
        summed(group, torch.zeros(5, 16))
        summed(group, torch.zeros(MORE_THAN_A_SLOT, WIDTH))
        count = group.counts().by_kind["all_reduce"]
        return count.number, count.traffic.sent_bytes, count.traffic.received_bytes

    num_bytes = 2 * 4 * (5 * 16 + MORE_THAN_A_SLOT * WIDTH)
    assert on_ranks(3, work) == [(2, num_bytes, num_bytes)] * 3


def test_a_rank_that_does_not_take_part_is_named_and_no_later_sum_waits() -> None:
    group = thread_group(3, name="verify", timeout_s=0.3)[0]
    for _ in range(2):
        with pytest.raises(
            PeerLost, match=r"lost verify rank 1 during all_reduce: no answer within 0\.3 s"
        ):
            summed(group, torch.ones(2, 16))
        assert group.host_sums.call.state[TURN] == 1


@pytest.mark.parametrize("by", [0, 1])
def test_an_aborted_group_ends_the_wait_of_a_rank_that_sleeps(by: int) -> None:
    groups = thread_group(2, timeout_s=60.0)
    timer = threading.Timer(0.3, lambda: groups[by].abort("its epoch is over"))
    timer.start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match="its epoch is over"):
        summed(groups[0], torch.ones(2, 16))
    timer.join()
    assert time.monotonic() - started_s < LATE_S


def test_the_rank_that_left_is_named_not_the_one_that_is_waited_for() -> None:
    groups = thread_group(3, timeout_s=60.0)
    groups[2].host_sums.abort()
    with pytest.raises(PeerLost, match=r"lost thread rank 2 .* the group was aborted"):
        summed(groups[0], ONES)


@pytest.mark.alone
def test_all_waits_of_a_sum_have_one_deadline() -> None:
    compile_calls()
    groups = thread_group(3, timeout_s=2.0)

    def come_late() -> None:
        with pytest.raises(PeerLost):
            summed(groups[1], ONES)

    timer = threading.Timer(1.5, come_late)
    timer.start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"lost thread rank 2 .* no answer within 2 s"):
        summed(groups[0], ONES)
    assert time.monotonic() - started_s < 3.2
    groups[1].host_sums.end_waits_for(2)
    timer.join()


def test_a_rank_that_has_lost_another_writes_no_slot_any_more() -> None:
    groups = thread_group(2, timeout_s=0.1)
    with pytest.raises(PeerLost):
        summed(groups[0], ONES)
    before = groups[0].host_sums.call.bases_G[0]
    memory = ctypes.string_at(int(before), MEMORY_BYTES)
    for _ in range(2):
        with pytest.raises(PeerLost):
            summed(groups[0], 7 * ONES)
    assert ctypes.string_at(int(before), MEMORY_BYTES) == memory


def test_a_rank_whose_connection_has_ended_is_not_waited_for() -> None:
    groups = thread_group(3, timeout_s=60.0)
    timer = threading.Timer(0.3, lambda: groups[0].host_sums.end_waits_for(2))
    timer.start()
    errors: list[PeerLost] = []

    def wait_for_all() -> None:
        with pytest.raises(PeerLost) as caught:
            summed(groups[1], ONES)
        errors.append(caught.value)

    helper = threading.Thread(target=wait_for_all)
    helper.start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"lost thread rank 2 .* its connection is gone"):
        summed(groups[0], ONES)
    assert time.monotonic() - started_s < LATE_S
    groups[1].abort("the test is over")
    helper.join(LATE_S)
    assert "the test is over" in str(errors)


def test_what_a_rank_had_written_before_it_left_is_summed() -> None:
    groups = thread_group(2, timeout_s=60.0)
    helper = threading.Thread(target=lambda: summed(groups[1], ONES))
    helper.start()
    while groups[1].host_sums.call.state[0] == 0:
        time.sleep(0.001)
    groups[0].host_sums.end_waits_for(1)
    assert torch.equal(summed(groups[0], ONES), 2 * ONES)
    helper.join(LATE_S)
    assert not helper.is_alive()


ONES = torch.ones(2, 16)
