"""One process is frozen, and each waiting process names it in time: stage, rank, node, round.

A frozen process keeps its connections, so only a deadline can detect it.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from eesd_dist.errors import PeerLost
from eesd_dist.transport import channel as draft_end
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.channel import DistVerifyChannel
from eesd_dist.transport.rendezvous import build_group, connect_store
from tests.dist.transport.peers import (
    draft_and_stop,
    follow_and_tell,
    host_store,
    join_channel,
    lead_and_tell,
    peer_process,
)
from tests.unit.transport.rounds import header, hidden

pytestmark = pytest.mark.dist

TIMEOUT_S = 2.0
LATE_S = 10.0
"""Allowed delay after the deadline."""


@pytest.fixture
def at() -> Iterator[Address]:
    host = StoreHost()
    yield host.at
    del host


def pipe() -> tuple[Connection, Connection]:
    return multiprocessing.get_context("forkserver").Pipe(duplex=False)


def freeze(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    # The signal is only sent so far: a thread of the process may still answer.
    states = list(Path(f"/proc/{process.pid}/task").glob("*/stat"))
    while any(state.read_text().rpartition(")")[2].split()[0] != "T" for state in states):
        time.sleep(0.001)


def hear(reports: Connection) -> tuple[float, PeerLost]:
    assert reports.poll(TIMEOUT_S + 20), "it has not ended"
    ended_s, error = reports.recv()
    assert isinstance(error, PeerLost)
    return ended_s, error


def turn(channel: DistVerifyChannel, round_id: int) -> None:
    channel.send(header(round_id, epoch=1), hidden())
    channel.receive()


def lost_by(act: Callable[[], object]) -> tuple[float, PeerLost]:
    with pytest.raises(PeerLost) as caught:
        act()
    return time.monotonic(), caught.value


def test_a_frozen_follower_is_named_by_verify_rank_0(
    at: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 must report first, even if its report is slow.
    monkeypatch.setattr(draft_end, "_GRACE_S", LATE_S - 1.0)
    reader, writer = pipe()
    silent = pipe()[1]
    with (
        peer_process(lead_and_tell, at, TIMEOUT_S, writer),
        peer_process(follow_and_tell, at, TIMEOUT_S, silent) as follower,
    ):
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=TIMEOUT_S))
        turn(channel, 1)
        freeze(follower)
        began_s = time.monotonic()
        at_s, draft_error = lost_by(lambda: turn(channel, 2))
        rank_0_s, theirs = hear(reader)
        assert str(theirs) == (
            "lost verify rank 1 on 127.0.0.1 during all_reduce of round 2 (epoch 1): "
            f"no answer within {TIMEOUT_S:g} s"
        )
        assert (theirs.round_id, theirs.epoch) == (2, 1)
        assert TIMEOUT_S - 0.1 < rank_0_s - began_s < TIMEOUT_S + LATE_S
        # The draft end waited longer, and saw rank 0 leave.
        assert draft_error.peer == "verify rank 0 on 127.0.0.1"
        assert "its connection is gone" in draft_error.reason
        assert at_s - began_s < TIMEOUT_S + LATE_S
        channel.close()


def test_a_frozen_verify_rank_0_is_named_by_both_its_neighbours(at: Address) -> None:
    reader, writer = pipe()
    silent = pipe()[1]
    with (
        peer_process(lead_and_tell, at, TIMEOUT_S, silent, 2),
        peer_process(follow_and_tell, at, TIMEOUT_S, writer, 2),
    ):
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=TIMEOUT_S))
        turn(channel, 1)
        began_s = time.monotonic()
        at_s, draft_error = lost_by(lambda: turn(channel, 2))
        follower_s, theirs = hear(reader)
        assert str(draft_error) == (
            "lost verify rank 0 on 127.0.0.1 during round 2 (epoch 1): "
            f"no answer within {TIMEOUT_S:g} s"
        )
        assert str(theirs) == (
            "lost verify rank 0 on 127.0.0.1 during all_reduce of round 2 (epoch 1): "
            f"no answer within {TIMEOUT_S:g} s"
        )
        for ended_s in (at_s, follower_s):
            assert TIMEOUT_S - 0.1 < ended_s - began_s < TIMEOUT_S + LATE_S
        channel.close()


def test_a_frozen_draft_end_is_waited_for_as_long_as_its_link_lives(at: Address) -> None:
    """By design: between rounds there is no deadline. A process with requests detects it."""
    from_lead, lead_tells = pipe()
    from_follower, follower_tells = pipe()
    from_draft, draft_tells = pipe()
    with (
        peer_process(lead_and_tell, at, TIMEOUT_S, lead_tells) as leader,
        peer_process(follow_and_tell, at, TIMEOUT_S, follower_tells) as follower,
        peer_process(draft_and_stop, at, TIMEOUT_S, draft_tells) as drafter,
    ):
        assert from_draft.recv() == "frozen"
        time.sleep(2 * TIMEOUT_S)
        assert not from_lead.poll()
        assert not from_follower.poll()
        assert drafter.pid is not None
        os.kill(drafter.pid, signal.SIGCONT)
        for reports in (from_draft, from_lead, from_follower):
            assert reports.poll(20)
            assert reports.recv()[1] is None
        for process in (leader, follower, drafter):
            process.join(10)
            assert process.exitcode == 0


def test_a_frozen_store_is_named_when_connecting_and_when_joining() -> None:
    reader, writer = pipe()
    with peer_process(host_store, writer) as host:
        at = reader.recv()
        store = connect_store(at, timeout_s=5.0)
        freeze(host)
        began_s = time.monotonic()
        _, connecting = lost_by(lambda: connect_store(at, timeout_s=1.0))
        _, joining = lost_by(
            lambda: build_group(
                store, epoch=4, name="verify", rank=0, size=2, timeout_s=1.0
            ).abort()
        )
        assert time.monotonic() - began_s < 2 * (1.0 + LATE_S)
        assert str(connecting) == (
            f"lost the rendezvous store at 127.0.0.1:{at.port} during connecting: "
            "no answer within 1 s"
        )
        assert joining.peer == "the rendezvous store"
        assert "joining group verify of epoch 4" in str(joining)
