"""Connections of others than the ranks do not change what a group computes, and are counted."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.group import ProcessGroup
from tests.dist.transport import intruders
from tests.dist.transport.intruders import Words
from tests.dist.transport.peers import in_threads, join_threads, peer_process
from tests.support.running import until

pytestmark = pytest.mark.dist

OUTSIDE = "127.0.0.2"
"""Another address than the ranks have."""
INSIDE = "127.0.0.1"
MOST_GROUPS = 200


@contextmanager
def _scanning(source: str, words: Words) -> Iterator[None]:
    reader, writer = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    own_pid = os.getpid()
    spared = intruders.listening_ports(own_pid)
    with peer_process(intruders.scan, source, words, own_pid, spared, writer):
        assert reader.recv() == "scanning"
        yield


def _sums(groups: list[ProcessGroup]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    inputs = [torch.randn(300, 192) for _ in groups]
    in_threads(
        *(lambda g=g, x=x: g.all_reduce(x) for g, x in zip(groups, inputs, strict=True))  # type: ignore[misc]
    )
    return inputs


@pytest.mark.parametrize("source", [OUTSIDE, INSIDE])
@pytest.mark.parametrize("words", ["silent", "garbage", "wrong proof", "gone at once"])
def test_groups_connect_and_compute_the_same_bits_during_a_scan(words: Words, source: str) -> None:
    expected = _sums(join_threads(3))
    refusals = RefusedConnections()
    num_groups = 0
    with _scanning(source, words):
        while num_groups < 5 or refusals.num_refused < 5:
            groups = join_threads(3, refusals=refusals)
            for _ in range(20):
                assert all(torch.equal(x, y) for x, y in zip(_sums(groups), expected, strict=True))
            for group in groups:
                group.abort("the test is over")
            num_groups += 1
            assert num_groups < MOST_GROUPS, "the scan found no listener"


def test_a_group_that_has_joined_listens_no_more() -> None:
    before = intruders.listening_ports(os.getpid())
    groups = join_threads(3)
    started_s = time.monotonic()
    until(lambda: intruders.listening_ports(os.getpid()) <= before)
    assert time.monotonic() - started_s < 10.0
    _sums(groups)
