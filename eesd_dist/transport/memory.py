"""Both ends of the verify channel in one process: the same order and errors, no sockets.

`MemoryChannel` calls the verifier in the thread that waits for the reply: nothing runs
concurrently, so a test repeats exactly. `memory_pair` connects two threads of one process.
Neither copies: hidden states belong to the channel from `send` until their reply.
"""

import queue
from collections import deque
from collections.abc import Callable

from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost, WireError
from eesd_dist.transport.contracts import RoundHeader, VerifyReply

# Shapes: T rows of a round, D hidden size, K drafted rows, V vocabulary.

Round = tuple[RoundHeader, Tensor, Tensor | None]
Verify = Callable[[RoundHeader, Tensor, Tensor | None], VerifyReply]


class MemoryChannel:
    """A verify channel without a peer: rounds are queued and verified in `receive`.

    Several rounds may be outstanding; they are verified in the order they were sent.
    """

    def __init__(self, verify: Verify, *, peer: str = "verifier in this process") -> None:
        self._verify = verify
        self._peer = peer
        self._outstanding: deque[Round] = deque()
        self._closed = False

    @property
    def peer(self) -> str:
        return self._peer

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        _refuse_if_closed(self._closed, peer=self._peer, round_id=header.round_id)
        self._outstanding.append((header, hidden_TD, draft_probs_KV))
        return _size_bytes(hidden_TD, draft_probs_KV)

    def receive(self) -> VerifyReply:
        if not self._outstanding:
            raise EngineError(f"no round is outstanding at {self._peer}: send one before receiving")
        header, hidden_TD, draft_probs_KV = self._outstanding.popleft()
        reply = self._verify(header, hidden_TD, draft_probs_KV)
        expect_round(reply, header.round_id)
        return reply

    def close(self) -> None:
        self._closed = True
        self._outstanding.clear()


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
        _refuse_if_closed(self._closed, peer=self._peer, round_id=header.round_id)
        self._outstanding.append(header.round_id)
        self._rounds.put((header, hidden_TD, draft_probs_KV))
        return _size_bytes(hidden_TD, draft_probs_KV)

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


def expect_round(reply: VerifyReply, round_id: int) -> None:
    """Raises WireError unless this is the reply to that round: replies come in round order."""
    if reply.round_id != round_id:
        raise WireError(f"found the reply to round {reply.round_id}, expected round {round_id}")


def _refuse_if_closed(closed: bool, *, peer: str, round_id: int) -> None:
    if closed:
        raise EngineError(f"the channel to {peer} is closed: round {round_id} cannot be sent")


def _size_bytes(hidden_TD: Tensor, draft_probs_KV: Tensor | None) -> int:
    return hidden_TD.nbytes + (0 if draft_probs_KV is None else draft_probs_KV.nbytes)
