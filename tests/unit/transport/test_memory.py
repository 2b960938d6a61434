"""The verify channel inside one process."""

import threading

import pytest
from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost, WireError
from eesd_dist.transport.contracts import RoundHeader, VerifyChannel, VerifyReply
from eesd_dist.transport.memory import MemoryChannel
from tests.support.paired_channel import memory_pair
from tests.unit.transport.rounds import header, hidden, reply_with


def answer(round_header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> VerifyReply:
    return reply_with(
        [round_header.round_id] * round_header.num_sampled, round_id=round_header.round_id
    )


def test_replies_come_in_the_order_of_their_rounds() -> None:
    channel: VerifyChannel = MemoryChannel(answer)
    x_TD = hidden()
    assert channel.send(header(1), x_TD) == x_TD.nbytes
    channel.send(header(2), x_TD)
    assert [channel.receive().round_id, channel.receive().round_id] == [1, 2]


def test_nothing_is_verified_before_a_wait_for_it() -> None:
    verified: list[int] = []

    def verify(
        round_header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None
    ) -> VerifyReply:
        verified.append(round_header.round_id)
        return answer(round_header, hidden_TD, probs_KV)

    channel = MemoryChannel(verify)
    channel.send(header(1), hidden())
    assert verified == []
    channel.receive()
    assert verified == [1]


def test_receiving_without_a_round_and_sending_after_close_are_refused() -> None:
    channel = MemoryChannel(answer)
    with pytest.raises(EngineError, match="no round is outstanding"):
        channel.receive()
    channel.close()
    with pytest.raises(EngineError, match="round 3 cannot be sent"):
        channel.send(header(3), hidden())


def test_a_reply_to_another_round_is_refused() -> None:
    channel = MemoryChannel(lambda *_: reply_with([1], round_id=99))
    channel.send(header(1), hidden())
    with pytest.raises(WireError, match="found the reply to round 99, expected round 1"):
        channel.receive()


def test_two_threads_talk_until_the_channel_is_closed() -> None:
    channel, source = memory_pair(timeout_s=5.0)

    def verify() -> None:
        while (received := source.next_round()) is not None:
            source.reply(answer(*received))

    verifier = threading.Thread(target=verify)
    verifier.start()
    channel.send(header(1), hidden())
    channel.send(header(2), hidden())
    assert [channel.receive().round_id, channel.receive().round_id] == [1, 2]
    channel.close()
    verifier.join(5.0)
    assert not verifier.is_alive()
    assert source.next_round() is None


def test_a_verifier_thread_that_never_answers_is_named() -> None:
    channel, _ = memory_pair(timeout_s=0.05, peer="verifier thread")
    channel.send(header(8), hidden())
    with pytest.raises(PeerLost, match=r"verifier thread during round 8: no reply within 0\.05 s"):
        channel.receive()
