"""A round between processes: sent and answered, two at a time, and after the peer is lost."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from eesd_dist.errors import EngineError, PeerLost, WireError
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.channel import DistRoundSource, DistVerifyChannel, follow_round
from eesd_dist.transport.contracts import RowFeatures
from tests.dist.transport.peers import (
    fingerprint,
    follow,
    join_channel,
    join_threads,
    join_verify_stage,
    lead,
    lead_and_stall,
    peer_process,
    verify,
    verify_nothing,
)
from tests.unit.transport.rounds import header, hidden, reply_with, segment

pytestmark = pytest.mark.dist

VERIFIER = r"verify rank 0 on 127\.0\.0\.1"
LATE_S = 10.0
"""Allowed delay of the end of a wait on a busy machine."""


@pytest.fixture
def at() -> Iterator[Address]:
    host = StoreHost()
    yield host.at
    del host


def test_a_round_of_any_form_and_its_reply_cross_two_processes(at: Address) -> None:
    long = replace(header(2, epoch=1), segments=(segment(history=tuple(range(20_000))),))
    rounds = [
        (header(1, epoch=1), hidden(4), None),
        (long, hidden(4, 5000, torch.bfloat16), None),
        (header(3, epoch=1), hidden(4), torch.rand(3, 6000)),
    ]
    with peer_process(verify, at, 10.0) as process:
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=10.0))
        for message in rounds:
            assert channel.send(*message) >= sum(x.nbytes for x in message[1:] if x is not None)
            reply = channel.receive()
            assert reply.round_id == message[0].round_id
            assert reply.tokens.tolist() == fingerprint(*message)
            assert reply.verify_s == 0.25
        channel.close()
        process.join(10)
        assert process.exitcode == 0


def test_two_rounds_are_outstanding_without_a_wait(at: Address) -> None:
    with peer_process(verify, at, 10.0, 1.5):
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=10.0))
        started_s = time.monotonic()
        channel.send(header(1, epoch=1), hidden(4, 5000))
        channel.send(header(2, epoch=1), hidden(4, 5000))
        assert time.monotonic() - started_s < 1.5
        assert channel.receive().round_id == 1
        assert channel.receive().round_id == 2
        with pytest.raises(EngineError, match=rf"no round is outstanding at {VERIFIER}"):
            channel.receive()
        channel.close()
        with pytest.raises(EngineError, match="round 3 cannot be sent"):
            channel.send(header(3, epoch=1), hidden())


def test_a_killed_verifier_is_named_at_once_and_ever_after(at: Address) -> None:
    with peer_process(verify_nothing, at, 10.0) as process:
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=10.0))
        channel.send(header(17, epoch=1), hidden())
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        started_s = time.monotonic()
        with pytest.raises(
            PeerLost, match=rf"lost {VERIFIER} during round 17 \(epoch 1\): its connection"
        ):
            channel.receive()
        assert time.monotonic() - started_s < 8.0, "it was not the deadline that told"
        with pytest.raises(PeerLost, match=rf"lost {VERIFIER} during round 18 "):
            channel.send(header(18, epoch=1), hidden())
        channel.close()


def test_a_verifier_killed_between_waits_is_noticed(at: Address) -> None:
    with peer_process(verify, at, 10.0) as process:
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=10.0))
        process.kill()
        process.join(LATE_S)
        with pytest.raises(PeerLost, match=rf"lost {VERIFIER} during round 1 "):
            channel.send(header(1, epoch=1), hidden())
        channel.close()


def test_a_frozen_verifier_is_named_at_the_deadline(at: Address) -> None:
    with peer_process(verify, at, 1.5) as process:
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=1.5))
        channel.send(header(1, epoch=1), hidden())
        channel.receive()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        channel.send(header(2, epoch=1), hidden(4, 5000))
        with pytest.raises(
            PeerLost,
            match=rf"lost {VERIFIER} during round 2 \(epoch 1\): no answer within 1\.5 s",
        ):
            channel.receive()
        assert 1.4 < time.monotonic() - started_s < 1.5 + LATE_S
        channel.close()


def test_silence_between_rounds_is_no_failure(at: Address) -> None:
    with peer_process(verify, at, 2.0):
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=2.0))
        for round_id in (1, 2):
            channel.send(header(round_id, epoch=1), hidden())
            assert channel.receive().round_id == round_id
            time.sleep(2.5)
        channel.close()


def test_followers_see_every_round_that_rank_0_sees(at: Address) -> None:
    with (
        peer_process(lead, at, 10.0) as leader,
        peer_process(follow, at, 10.0) as follower,
    ):
        channel = DistVerifyChannel(join_channel(at, 0, timeout_s=10.0))
        for message in (
            (header(1, epoch=1), hidden(4), None),
            (header(2, epoch=1), hidden(4, 5000), torch.rand(3, 6000)),
        ):
            channel.send(*message)
            assert channel.receive().tokens.tolist() == fingerprint(*message)
        channel.close()
        for process in (leader, follower):
            process.join(10)
            assert process.exitcode == 0


def test_a_follower_of_a_dead_leader_names_it(at: Address) -> None:
    with peer_process(lead_and_stall, at, 10.0) as leader:
        stage = join_verify_stage(at, 1, timeout_s=10.0)
        killer = threading.Timer(0.2, leader.kill)
        killer.start()
        with pytest.raises(PeerLost, match=rf"lost {VERIFIER} during waiting for a shared round"):
            follow_round(stage)


def test_a_round_of_another_epoch_is_refused_and_its_sender_hears_of_the_loss() -> None:
    drafting, verifying = join_threads(2)
    channel, source = DistVerifyChannel(drafting), DistRoundSource(verifying)
    channel.send(header(1, epoch=7), hidden())
    with pytest.raises(WireError, match="epoch 7, expected 1"):
        source.next_round()
    verifying.abort("a message of another epoch")
    with pytest.raises(PeerLost, match=r"lost threads rank 1 on 127\.0\.0\.1 during round 1 "):
        channel.receive()
    channel.close()


def test_a_large_reply_does_not_keep_the_verifier_from_the_next_round() -> None:
    """The draft end reads a reply when it has computed, and may send a round before that."""
    drafting, verifying = join_threads(2, timeout_s=10.0)
    source, channel = DistRoundSource(verifying), DistVerifyChannel(drafting)
    for round_id in (1, 2):
        channel.send(header(round_id, epoch=1), hidden())
    large = RowFeatures(
        hidden=(np.zeros((2, 4 << 20), np.float32),),
        top_ids=np.zeros((2, 1), np.int32),
        top_logits=np.zeros((2, 1), np.float32),
        lse=np.zeros(2, np.float32),
    )
    assert source.next_round() is not None
    source.reply(replace(reply_with([1], round_id=1), features=large))
    assert source.next_round() is not None
    replying = threading.Thread(target=source.reply, args=(reply_with([1], round_id=2),))
    replying.start()
    for round_id in (1, 2):
        assert channel.receive().round_id == round_id
    replying.join(LATE_S)
    drafting.abort()
    verifying.abort()


def test_a_rank_says_which_round_it_is_in_and_none_while_it_waits_for_the_next() -> None:
    drafting, verifying = join_threads(2)
    source, channel = DistRoundSource(verifying), DistVerifyChannel(drafting)
    assert verifying.number is None
    channel.send(header(5, epoch=1), hidden())
    assert source.next_round() is not None
    assert verifying.number == 5, "until it has asked for the next round"
    waiting = threading.Thread(target=source.next_round)
    waiting.start()
    time.sleep(0.2)
    assert verifying.number is None
    channel.send(header(6, epoch=1), hidden())
    waiting.join(LATE_S)
    assert verifying.number == 6
    verifying.abort("the test is over")
    drafting.abort()


def test_abort_wakes_the_thread_that_waits_for_a_round() -> None:
    drafting, verifying = join_threads(2)
    source = DistRoundSource(verifying)
    caught: list[PeerLost] = []

    def wait_for_a_round() -> None:
        with pytest.raises(PeerLost) as info:
            source.next_round()
        caught.append(info.value)

    waiting = threading.Thread(target=wait_for_a_round)
    waiting.start()
    time.sleep(0.2)
    started_s = time.monotonic()
    verifying.abort("epoch 2 replaces it")
    waiting.join(LATE_S)
    assert time.monotonic() - started_s < LATE_S
    assert caught[0].reason == "epoch 2 replaces it"
    assert caught[0].peer == "threads rank 0 on 127.0.0.1"
    drafting.abort()
