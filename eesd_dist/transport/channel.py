"""The verify channel between processes, and the sharing of rounds among verify ranks.

A round is a frame, followed by what does not fit in it; so is a reply. `send` only starts the
transfers: their tensors belong to the channel until the round's reply is received. A thread of the
draft end receives replies, so that drafting can go on and a lost peer is noticed even while no call
waits for it.

There are two kinds of wait. Between rounds verify ranks wait as long as their peer lives (keepalive
ends that wait when the link is cut). Within a round every wait has the group's deadline; when it
passes, the group is aborted, because Gloo closes a link on which a wait timed out. The draft end
waits slightly longer than the verify ranks, so that a verify rank that waits for another verify
rank reports that first.

The content of a round is not interpreted here.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost, WireError
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.memory import Round, expect_round
from eesd_dist.transport.transfers import Tag, Transfer, finish_all

logger = logging.getLogger(__name__)

# Shapes: T rows of a round, D hidden size, K drafted rows, V vocabulary.

_GRACE_S = 0.3
"""Extra time that the draft end waits for a reply, beyond the deadline of the verify ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outstanding:
    round_id: int
    start_s: float
    transfers: tuple[Transfer, ...]


class DistVerifyChannel:
    """The draft stage's end; the group's other rank is verify rank 0."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._to = _only_peer(group)
        self._outstanding: deque[_Outstanding] = deque()
        self._arrived: queue.SimpleQueue[VerifyReply | None] = queue.SimpleQueue()
        self._last_reply_s = time.monotonic()
        self._failure: Exception | None = None
        self._closed = False
        self._receiver = threading.Thread(
            target=self._receive_replies, name=f"replies from {self.peer}", daemon=True
        )
        self._receiver.start()

    @property
    def peer(self) -> str:
        return self._group.members[self._to]

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        """Starts sending a round and returns its size in bytes. The tensors must not change until
        the round's reply has been received."""
        operation = f"round {header.round_id}"
        self._refuse_if_done(operation, header.round_id)
        self._group.doing(header.round_id)
        message = wire.encode_round(header, hidden_TD, draft_probs_KV)
        tensors = (*message.parts, *message.separate)
        transfers = tuple(
            self._group.isend(tensor, to=self._to, tag=Tag.ROUND, operation=operation)
            for tensor in tensors
        )
        self._outstanding.append(
            _Outstanding(round_id=header.round_id, start_s=time.monotonic(), transfers=transfers)
        )
        return sum(tensor.nbytes for tensor in tensors)

    def receive(self) -> VerifyReply:
        if not self._outstanding:
            raise EngineError(f"no round is outstanding at {self.peer}: send one before receiving")
        awaited = self._outstanding.popleft()
        reply = self._await_reply(awaited)
        expect_round(reply, awaited.round_id)
        self._last_reply_s = time.monotonic()
        # The peer has answered, so it has received the round: these waits return at once.
        finish_all(awaited.transfers, timeout_s=self._group.timeout_s)
        return reply

    def close(self) -> None:
        """Sends a close message, waits for its answer until the deadline, and ends the receiver."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self._group.timeout_s
        if self._failure is None:
            self._say_goodbye()
            self._receiver.join(max(deadline - time.monotonic(), 0.0))
        if self._receiver.is_alive():
            self._group.abort("the channel was closed")
            self._receiver.join(self._group.timeout_s)
        self._outstanding.clear()

    def _await_reply(self, awaited: _Outstanding) -> VerifyReply:
        timeout_s = self._group.timeout_s
        # The peer works on one round at a time: the clock starts when it can begin this one.
        deadline = max(awaited.start_s, self._last_reply_s) + timeout_s + _GRACE_S
        try:
            reply = self._arrived.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            reason = f"no reply within {timeout_s:g} s"
            self._failure = self._lost(awaited.round_id, reason)
            self._group.abort(reason)
            raise self._failure from None
        if reply is not None:
            return reply
        self._arrived.put(None)  # so that a second call raises the same
        if isinstance(self._failure, PeerLost):
            raise self._lost(awaited.round_id, self._failure.reason) from self._failure
        if self._failure is not None:
            raise self._failure
        raise self._lost(awaited.round_id, "it closed the channel")

    def _lost(self, round_id: int, reason: str) -> PeerLost:
        return self._group.lost(
            self._to, operation=f"round {round_id}", reason=reason, round_id=round_id
        )

    def _receive_replies(self) -> None:
        try:
            while (reply := self._next_reply()) is not None:
                self._arrived.put(reply)
        except Exception as error:  # raised again in the thread that waits for the reply
            if self._failure is None:
                self._failure = error
        finally:
            self._arrived.put(None)

    def _next_reply(self) -> VerifyReply | None:
        frame = wire.reply_frame()
        operation = "waiting for a reply"
        self._receive(frame, operation).finish(timeout_s=None)
        prefix = wire.decode_prefix(frame, epoch=self._group.epoch)
        if prefix.kind is wire.Kind.CLOSE:
            return None
        overflow = wire.empty_overflow(prefix)
        if overflow is not None:
            self._receive(overflow, operation).finish(timeout_s=self._group.timeout_s)
        return wire.decode_reply(prefix, frame, overflow)

    def _receive(self, x: Tensor, operation: str) -> Transfer:
        return self._group.irecv(x, source=self._to, tag=Tag.REPLY, operation=operation)

    def _refuse_if_done(self, operation: str, round_id: int) -> None:
        if self._closed:
            raise EngineError(f"the channel to {self.peer} is closed: {operation} cannot be sent")
        if isinstance(self._failure, PeerLost):
            raise self._lost(round_id, self._failure.reason) from self._failure
        if self._failure is not None:
            raise self._failure

    def _say_goodbye(self) -> None:
        farewell = wire.encode_close(epoch=self._group.epoch).frame
        try:
            self._group.send(farewell, to=self._to, tag=Tag.ROUND, operation="closing the channel")
        except PeerLost as error:
            logger.info("peer gone before the channel was closed: %s", error)


class DistRoundSource:
    """Verify rank 0's end; the group's other rank is the draft stage."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._from = _only_peer(group)
        self._closed = False
        self._post_next_frame()

    @property
    def peer(self) -> str:
        return self._group.members[self._from]

    def next_round(self) -> Round | None:
        if self._closed:
            return None
        self._group.doing(None)
        frame = self._frame.finish(timeout_s=None)
        prefix = wire.decode_prefix(frame, epoch=self._group.epoch)
        self._group.doing(prefix.round_id)
        if prefix.kind is wire.Kind.CLOSE:
            self._closed = True
            farewell = wire.encode_close(
                epoch=self._group.epoch, frame_bytes=wire.REPLY_FRAME_BYTES
            )
            self._answer(farewell, "closing the channel", is_last=True)
            return None
        operation = f"round {prefix.round_id}"

        def receive(x: Tensor) -> Tensor:
            return self._group.recv(x, source=self._from, tag=Tag.ROUND, operation=operation)

        received = _receive_after(prefix, frame, receive, receive, device=self._group.device)
        self._post_next_frame()  # so that the next frame can arrive while this round runs
        return received

    def reply(self, reply: VerifyReply) -> None:
        self._group.check()  # an aborted transfer leaves garbage and raises nothing
        message = wire.encode_reply(reply, epoch=self._group.epoch)
        self._answer(message, f"the reply to round {reply.round_id}")

    def _answer(self, message: wire.Message, operation: str, *, is_last: bool = False) -> None:
        transfers = [
            self._group.isend(
                tensor, to=self._from, tag=Tag.REPLY, operation=operation, confirmed=is_last
            )
            for tensor in message.parts
        ]
        finish_all(transfers, timeout_s=self._group.timeout_s)

    def _post_next_frame(self) -> None:
        self._frame = self._group.irecv(
            wire.round_frame(), source=self._from, tag=Tag.ROUND, operation="waiting for a round"
        )


def share_round(
    group: ProcessGroup,
    header: RoundHeader,
    hidden_TD: Tensor,
    draft_probs_KV: Tensor | None = None,
) -> list[Transfer]:
    """Sends a round from verify rank 0 to its followers, which are in `follow_round`.

    The returned transfers are in progress: compute the round, do not change its tensors, and finish
    the transfers afterwards.
    """
    group.doing(header.round_id)
    message = wire.encode_round(header, hidden_TD, draft_probs_KV)
    transfers = _to_followers(group, message, operation=f"sharing round {header.round_id}")
    for x in message.separate:
        transfers += group.start_broadcast(x.contiguous())
    return transfers


def share_close(group: ProcessGroup) -> None:
    """Closes the group from verify rank 0: `follow_round` returns None at its followers."""
    message = wire.encode_close(epoch=group.epoch)
    group.doing(None)
    transfers = _to_followers(group, message, operation="closing the group", is_last=True)
    finish_all(transfers, timeout_s=group.timeout_s)


def follow_round(group: ProcessGroup) -> Round | None:
    """Returns the next round from verify rank 0, or None when it has closed the group.

    Waits for a round as long as rank 0 lives; once one has begun, waits have the group's deadline.
    """
    frame = wire.round_frame()
    waiting = group.irecv(frame, source=0, tag=Tag.SHARE, operation="waiting for a shared round")
    group.doing(None)
    waiting.finish(timeout_s=None)
    prefix = wire.decode_prefix(frame, epoch=group.epoch)
    if prefix.kind is wire.Kind.CLOSE:
        return None
    group.doing(prefix.round_id)
    operation = f"sharing round {prefix.round_id}"

    def receive(x: Tensor) -> Tensor:
        return group.recv(x, source=0, tag=Tag.SHARE, operation=operation)

    return _receive_after(prefix, frame, receive, group.broadcast, device=group.device)


def _to_followers(
    group: ProcessGroup, message: wire.Message, *, operation: str, is_last: bool = False
) -> list[Transfer]:
    assert group.rank == 0, f"rank {group.rank} shares a round, only rank 0 may"
    return [
        group.isend(tensor, to=follower, tag=Tag.SHARE, operation=operation, confirmed=is_last)
        for tensor in message.parts
        for follower in range(1, group.size)
    ]


def _receive_after(
    prefix: wire.Prefix,
    frame: Tensor,
    receive: Callable[[Tensor], Tensor],
    receive_tensor: Callable[[Tensor], Tensor],
    *,
    device: torch.device,
) -> Round:
    """Receives what follows a frame: first the payload, then the tensors that it does not hold."""
    overflow = wire.empty_overflow(prefix)
    if overflow is not None:
        receive(overflow)
    header = wire.decode_round(prefix, frame, overflow)
    hidden_TD, draft_probs_KV = wire.receive_tensors(prefix, frame, receive_tensor, device=device)
    if hidden_TD is None:
        raise WireError(f"found no hidden states in round {prefix.round_id}, expected a matrix")
    return header, hidden_TD, draft_probs_KV


def _only_peer(group: ProcessGroup) -> int:
    assert group.size == 2, f"a channel joins 2 ranks, group {group.name} has {group.size}"
    return 1 - group.rank
