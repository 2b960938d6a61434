"""Links: replies in a thread, losses at a chosen round, rounds encoded as on the wire."""

import threading

import pytest
import torch
from torch import Tensor

from eesd_dist.bench.fuzz.links import FaultyChannel, FutureChannel, encoded
from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.memory import MemoryChannel
from tests.unit.transport.rounds import header, hidden, reply_with


def _answer(header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> VerifyReply:
    return reply_with([int(hidden_TD.shape[0])], round_id=header.round_id)


def test_a_reply_is_received_when_it_arrives() -> None:
    may_answer = threading.Event()

    def slow(header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> VerifyReply:
        may_answer.wait(20.0)
        return _answer(header, hidden_TD, probs_KV)

    channel = FutureChannel(slow, timeout_s=20.0)
    channel.send(header(), hidden())
    may_answer.set()
    assert channel.receive().round_id == header().round_id
    with pytest.raises(EngineError, match="no round is outstanding"):
        channel.receive()
    channel.close()


def test_a_verify_stage_that_does_not_answer_is_named() -> None:
    may_end = threading.Event()

    def stuck(header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> VerifyReply:
        may_end.wait(20.0)
        return _answer(header, hidden_TD, probs_KV)

    channel = FutureChannel(stuck, timeout_s=0.05)
    channel.send(header(), hidden())
    with pytest.raises(PeerLost, match=r"no reply within 0\.05 s"):
        channel.receive()
    may_end.set()
    channel.close()


def test_a_loss_comes_at_the_chosen_round() -> None:
    channel = FaultyChannel(MemoryChannel(_answer))
    channel.lose_at("receive", after=1)
    for _ in range(2):
        channel.send(header(), hidden())
    channel.receive()
    with pytest.raises(PeerLost, match="lost on purpose"):
        channel.receive()


def test_a_round_arrives_as_it_was_sent() -> None:
    seen: list[tuple[RoundHeader, Tensor]] = []

    def keep(header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> VerifyReply:
        seen.append((header, hidden_TD))
        return _answer(header, hidden_TD, probs_KV)

    reply = encoded(keep)(header(), hidden(), None)
    ((arrived, hidden_TD),) = seen
    assert arrived == header()
    assert torch.equal(hidden_TD, hidden())
    assert reply.wire_bytes > 0
