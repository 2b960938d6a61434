"""Both ends of the verify channel as two threads of one process."""

import queue
from collections import deque

from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.memory import Round, expect_round

# Shapes: T rows of a round, D hidden size, K drafted rows, V vocabulary.


class PairedChannel:
    """The draft thread's end of `memory_pair`."""

    def __init__(
        self,
        rounds: "queue.SimpleQueue[Round | None]",
        replies: "queue.SimpleQueue[VerifyReply]",
        *,
        timeout_s: float,
        peer: str,
    ) -> None:
        self._rounds = rounds
        self._replies = replies
        self._timeout_s = timeout_s
        self._peer = peer
        self._outstanding: deque[int] = deque()
        self._closed = False

    @property
    def peer(self) -> str:
        return self._peer

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        if self._closed:
            raise EngineError(f"the channel to {self._peer} is closed")
        self._outstanding.append(header.round_id)
        self._rounds.put((header, hidden_TD, draft_probs_KV))
        return hidden_TD.nbytes + (0 if draft_probs_KV is None else draft_probs_KV.nbytes)

    def receive(self) -> VerifyReply:
        if not self._outstanding:
            raise EngineError(f"no round is outstanding at {self._peer}: send one before receiving")
        round_id = self._outstanding.popleft()
        try:
            reply = self._replies.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerLost(
                peer=self._peer,
                operation=f"round {round_id}",
                reason=f"no reply within {self._timeout_s:g} s",
            ) from None
        expect_round(reply, round_id)
        return reply

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._rounds.put(None)


class PairedSource:
    """The verify thread's end of `memory_pair`. Waits for a round until the channel is closed."""

    def __init__(
        self,
        rounds: "queue.SimpleQueue[Round | None]",
        replies: "queue.SimpleQueue[VerifyReply]",
    ) -> None:
        self._rounds = rounds
        self._replies = replies
        self._closed = False

    def next_round(self) -> Round | None:
        if self._closed:
            return None
        received = self._rounds.get()
        self._closed = received is None
        return received

    def reply(self, reply: VerifyReply) -> None:
        self._replies.put(reply)


def memory_pair(
    *, timeout_s: float, peer: str = "verifier thread"
) -> tuple[PairedChannel, PairedSource]:
    """Returns two ends connected by queues, one for each of two threads."""
    rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
    replies: queue.SimpleQueue[VerifyReply] = queue.SimpleQueue()
    channel = PairedChannel(rounds, replies, timeout_s=timeout_s, peer=peer)
    return channel, PairedSource(rounds, replies)
