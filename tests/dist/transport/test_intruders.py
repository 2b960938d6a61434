"""Connections of others than the ranks do not change what a group computes, and are counted."""

import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.transport import gloo, rendezvous
from eesd_dist.transport.authentication.connection_filter import Listeners, filter_denial
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreClient
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.gloo import GlooDevice, GlooPlane
from eesd_dist.transport.group import ProcessGroup
from tests.dist.transport import intruders
from tests.dist.transport.intruders import Words
from tests.dist.transport.peers import RANKS, in_threads, join_threads, peer_process

pytestmark = pytest.mark.dist

FILTERS = filter_denial() is None
"""Without filters (`test_ordinary_user` runs this file so) no socket listens when a group is
connected, and the kernel does not count what it refuses."""

OUTSIDE = "127.0.0.2"
"""Another address than the ranks have."""
INSIDE = "127.0.0.1"
_MOST_LOST = 8


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


def _joined(refusals: RefusedConnections) -> list[ProcessGroup]:
    """Without filters a stranger may take the place of a rank (docs/security.md): the group ends
    before it computes, and the next epoch forms another one."""
    for _ in range(0 if FILTERS else _MOST_LOST):
        try:
            return join_threads(3, refusals=refusals)
        except PeerLost:
            pass
        except BaseExceptionGroup as errors:
            if errors.split(PeerLost)[1] is not None:
                raise
    return join_threads(3, refusals=refusals)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("words", ["silent", "garbage", "pair numbers", "gone at once"])
def test_groups_connect_and_compute_the_same_bits_during_a_scan_from_another_host(
    words: Words,
) -> None:
    expected = _sums(join_threads(3))
    refusals = RefusedConnections()
    with _scanning(OUTSIDE, words):
        for _ in range(5):
            groups = _joined(refusals)
            for _ in range(20):
                assert all(torch.equal(x, y) for x, y in zip(_sums(groups), expected, strict=True))
            for group in groups:
                group.abort("the test is over")
    assert refusals.num_refused > 20 or not FILTERS


@pytest.mark.parametrize("words", ["silent", "garbage", "gone at once"])
def test_groups_connect_and_compute_the_same_bits_during_a_scan_from_a_ranks_host(
    words: Words,
) -> None:
    expected = _sums(join_threads(3))
    refusals = RefusedConnections()
    with _scanning(INSIDE, words):
        for _ in range(5):
            groups = _joined(refusals)
            for _ in range(20):
                assert all(torch.equal(x, y) for x, y in zip(_sums(groups), expected, strict=True))
            for group in groups:
                group.abort("the test is over")
    assert refusals.num_refused > 20 or not FILTERS


def test_nothing_connects_to_a_running_group_and_packets_that_are_dropped_are_counted_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports: list[int] = []

    class KnownDevice(GlooDevice):
        def __init__(self, address: str, *, refusals: RefusedConnections | None = None) -> None:
            super().__init__(address, refusals=refusals)
            ports.extend(port for _, port in self.addresses)

    monkeypatch.setattr(rendezvous, "GlooDevice", KnownDevice)
    refusals = RefusedConnections()
    groups = join_threads(2, refusals=refusals)
    expected = _sums(groups)
    first = ports[0]
    reader, writer = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    with peer_process(intruders.knock, INSIDE, (INSIDE, first), "pair numbers", 7, writer):
        reader.recv()
        assert refusals.num_refused == (7 if FILTERS else 0)
        assert FILTERS or not intruders.listening_ports(os.getpid()).intersection(ports)
        assert all(torch.equal(x, y) for x, y in zip(_sums(groups), expected, strict=True))
    for group in groups:
        group.abort("the test is over")
    assert refusals.num_refused >= 7 or not FILTERS, "still known when the group has ended"


@contextmanager
def _found_first(
    monkeypatch: pytest.MonkeyPatch, *, times: int
) -> Iterator[list[gloo.SocketAddress]]:
    """Connects to that many new sockets before they have their guard, with the number of a pair;
    yields the addresses of all new sockets."""
    addresses: list[gloo.SocketAddress] = []
    new = Listeners.new

    def found_first(listeners: Listeners) -> int:
        handle = new(listeners)
        with socket.socket(fileno=os.dup(handle)) as listener:
            addresses.append(listener.getsockname()[:2])
        if len(addresses) <= times:
            intruder = ends.enter_context(socket.create_connection(addresses[-1]))
            intruder.sendall(bytes(8))
        return handle

    monkeypatch.setattr(Listeners, "new", found_first)
    with ExitStack() as ends:
        yield addresses


def test_a_socket_that_was_found_before_its_guard_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = RefusedConnections()
    with _found_first(monkeypatch, times=2) as addresses:
        device = GlooDevice(INSIDE, refusals=refusals)
    assert len(addresses) == 3
    assert device.addresses == {addresses[-1]}
    assert refusals.num_refused == 2
    device.release()


def test_a_scan_that_finds_every_socket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        _found_first(monkeypatch, times=1_000),
        pytest.raises(EngineError, match="stop the port scan"),
    ):
        GlooDevice(INSIDE)


class Planes:
    """Two ranks' planes, with a moment between opening the guards and connecting."""

    def __init__(self) -> None:
        self.refusals = RefusedConnections()
        self.devices = [GlooDevice(INSIDE, refusals=self.refusals) for _ in range(2)]
        for device in self.devices:
            device.guard.admit([INSIDE])

    def listener(self) -> tuple[intruders.Address, int]:
        """Returns the address and the rank to which the other rank connects. Gloo compares ports
        in network byte order."""
        ports = [socket.htons(port) for device in self.devices for _, port in device.addresses]
        rank = ports.index(min(ports))
        (at,) = self.devices[rank].addresses
        return at, rank

    def connect(self, *, timeout_s: float = 10.0) -> list[GlooPlane]:
        store = HashStore()
        planes: dict[int, GlooPlane] = {}

        def join(rank: int) -> None:
            planes[rank] = GlooPlane(
                store,
                rank=rank,
                size=2,
                timeout_s=timeout_s,
                device=self.devices[rank],
                peer_addresses=self.devices[1 - rank].addresses,
            )

        in_threads(lambda: join(0), lambda: join(1))
        opened = planes[0].opened() | planes[1].opened()
        for rank in range(2):
            planes[rank].cut_unreported(opened)
        return [planes[0], planes[1]]


@pytest.mark.parametrize("words", ["silent", "garbage"])
def test_a_connection_that_got_in_before_the_group_was_connected_is_cut_and_counted(
    words: Words,
) -> None:
    ranks = Planes()
    reader, writer = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    (at,) = ranks.devices[0].addresses
    with peer_process(intruders.knock, INSIDE, at, words, 3, writer):
        reader.recv()
        first, second = ranks.connect()
        _wait_until(lambda: ranks.refusals.num_refused == 3)
        received = torch.zeros(3)
        receiving = second.irecv(received, source=0, tag=1)
        first.isend(torch.arange(3.0), to=1, tag=1, confirmed=True).wait(timeout_s=10.0)
        receiving.wait(timeout_s=10.0)
        assert received.tolist() == [0.0, 1.0, 2.0]


def test_an_intruder_in_the_place_of_a_rank_is_cut_and_nothing_is_received_from_it() -> None:
    """Gloo drops the connection of the rank that it replaces. A rank that notices that before the
    ranks report their connections does not get in: one of two outcomes."""
    ranks = Planes()
    reader, writer = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    at, waiting = ranks.listener()
    with peer_process(intruders.knock, INSIDE, at, "pair numbers", 3, writer):
        reader.recv()
        try:
            planes = ranks.connect(timeout_s=1.0)
        except RuntimeError as error:
            pattern = "Connect timeout|Connection refused|reset by peer|losed by peer"
            assert re.search(pattern, str(error))  # noqa: PT017
            return
        assert ranks.refusals.num_refused == 3
        x = torch.ones(3)
        with pytest.raises(RuntimeError, match=r"closed|Connection"):
            planes[waiting].irecv(x, source=1 - waiting, tag=1).wait(timeout_s=10.0)
        assert x.tolist() == [1.0, 1.0, 1.0]


def _exchange(rank: int, *, secret: str, timeout_s: float = 10.0) -> rendezvous._Exchange:
    return rendezvous._Exchange(
        StoreClient(Address(host=INSIDE, port=1, secret=secret)),
        prefix="epoch 1/threads",
        rank=rank,
        members=RANKS,
        timeout_s=timeout_s,
        operation="joining",
    )


def test_ranks_prove_the_secret_and_one_in_whose_place_is_a_stranger_is_named() -> None:
    def prove(rank: int, plane: GlooPlane, secret: str) -> str:
        try:
            rendezvous._prove_secret(plane, _exchange(rank, secret=secret))
        except PeerLost as error:
            return f"{error.peer}: {error}"
        return "proven"

    for secrets, expected in (
        (("its own", "its own"), ["proven", "proven"]),
        (("its own", "a guess"), [f"{RANKS[1]}: ", f"{RANKS[0]}: "]),
    ):
        planes = Planes().connect()
        with ThreadPoolExecutor(2) as threads:
            ends = list(threads.map(prove, (0, 1), planes, secrets))
        assert [end[: len(text)] for end, text in zip(ends, expected, strict=True)] == expected
        assert all("does not know the epoch's secret" in end or end == "proven" for end in ends)


def test_a_stranger_that_proves_nothing_is_named_within_the_time_to_join() -> None:
    first, _ = Planes().connect()
    with pytest.raises(PeerLost, match=RANKS[1]) as lost:
        rendezvous._prove_secret(first, _exchange(0, secret="its own", timeout_s=0.5))
    assert lost.value.peer == RANKS[1]
