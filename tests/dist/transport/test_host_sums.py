"""Sums inside of compiled calls, by ranks that are processes of one host."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eesd_dist.errors import PeerLost
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import host_group_of
from tests.dist.transport.peers import join_threads, join_verify_stage, peer_process
from tests.support.host_sum_calls import compile_calls, summed
from tests.support.running import until

pytestmark = pytest.mark.dist

LATE_S = 10.0
"""Allowed delay of the end of a wait on a busy machine."""
NUM_SUMS = 50
ONES = torch.ones(3, 16)


@pytest.fixture
def at() -> Iterator[Address]:
    host = StoreHost()
    yield host.at
    del host


def sum_and_wait(at: Address, rank: int, size: int) -> None:
    """Sums as often as the others, then waits to be killed."""
    compile_calls()
    group = join_verify_stage(at, rank, timeout_s=30.0, size=size)
    for _ in range(NUM_SUMS):
        summed(group, ONES)
    time.sleep(3600)


def joined(at: Address, size: int, *, timeout_s: float) -> ProcessGroup:
    compile_calls()
    group = join_verify_stage(at, 0, timeout_s=timeout_s, size=size)
    for _ in range(NUM_SUMS):
        assert torch.equal(summed(group, ONES), size * ONES)
    return group


def lost_by_a_sum(group: ProcessGroup) -> tuple[float, str]:
    started_s = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        summed(group, ONES)
    return time.monotonic() - started_s, str(caught.value)


def test_a_killed_rank_is_named_long_before_the_deadline(at: Address) -> None:
    with peer_process(sum_and_wait, at, 1, 2) as peer:
        group = joined(at, 2, timeout_s=300.0)
        group.doing(7)
        assert peer.pid is not None
        timer = threading.Timer(0.3, os.kill, (peer.pid, signal.SIGKILL))
        timer.start()
        took_s, message = lost_by_a_sum(group)
        timer.join()
    assert "lost verify rank 1 on 127.0.0.1 during all_reduce of round 7" in message
    assert "its connection is gone" in message
    assert took_s < LATE_S


def test_a_frozen_rank_is_named_at_the_deadline(at: Address) -> None:
    with peer_process(sum_and_wait, at, 1, 2) as peer:
        group = joined(at, 2, timeout_s=1.0)
        assert peer.pid is not None
        os.kill(peer.pid, signal.SIGSTOP)
        took_s, message = lost_by_a_sum(group)
    assert "lost verify rank 1" in message
    assert "no answer within 1 s" in message
    assert 0.9 < took_s < LATE_S


def test_an_abort_of_any_rank_ends_the_waits_of_all() -> None:
    groups = join_threads(2, timeout_s=300.0)
    timer = threading.Timer(0.3, groups[1].abort, ("its epoch is over",))
    timer.start()
    took_s, message = lost_by_a_sum(groups[0])
    timer.join()
    assert "lost threads rank 1" in message
    assert took_s < LATE_S
    groups[0].abort()


def test_nothing_is_left_of_groups_that_have_ended() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:eesd-sums")

    def join_and_abort() -> None:
        groups = join_threads(2)
        assert all(host_group_of(group) is group for group in groups)
        for group in groups:
            group.abort()

    before = mapped()
    for _ in range(6):
        join_and_abort()

    def only_the_last_is_left() -> bool:
        join_and_abort()  # frees what was retired
        return mapped() - before <= 4

    until(only_the_last_is_left)  # the watch of connections may still hold a link for a moment
