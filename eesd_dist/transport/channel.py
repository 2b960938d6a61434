"""The verify channel between processes, and the sharing of rounds among verify ranks.

A round is one message, followed by its tensors if they are on a GPU; a reply is one message. `send`
only starts the transfers: their tensors belong to the channel until the round's reply is received.
The thread that waits for a reply reads it from the connection itself.

There are two kinds of wait. Between rounds verify ranks wait as long as their peer lives (keepalive
ends that wait when the link is cut). Within a round every wait has the group's deadline; when it
passes, the link has ended and the group is aborted. The draft end waits slightly longer than the
verify ranks, so that a verify rank that waits for another verify rank reports that first.

The content of a round is not interpreted here.
"""

import logging
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
        self._last_reply_s = time.monotonic()
        self._closed = False

    @property
    def peer(self) -> str:
        return self._group.members[self._to]

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        """Starts sending a round and returns its size in bytes. The tensors must not change until
        the round's reply has been received."""
        operation = f"round {header.round_id}"
        if self._closed:
            raise EngineError(f"the channel to {self.peer} is closed: {operation} cannot be sent")
        self._group.doing(header.round_id)
        message = wire.encode_round(header, hidden_TD, draft_probs_KV)
        first = self._group.send_message(
            message.buffers, to=self._to, tag=Tag.ROUND, operation=operation
        )
        others = [
            self._group.isend(tensor, to=self._to, tag=Tag.ROUND, operation=operation)
            for tensor in message.separate
        ]
        self._outstanding.append(
            _Outstanding(
                round_id=header.round_id, start_s=time.monotonic(), transfers=(first, *others)
            )
        )
        return message.size_bytes + sum(tensor.nbytes for tensor in message.separate)

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
        """Sends a close message, and waits for its answer until the deadline."""
        if self._closed:
            return
        self._closed = True
        self._outstanding.clear()
        if self._group.is_aborted:
            return
        try:
            self._say_goodbye()
        except (PeerLost, WireError) as error:
            logger.info("peer gone before the channel was closed: %s", error)
            self._group.abort("the channel was closed")

    def _await_reply(self, awaited: _Outstanding) -> VerifyReply:
        # The peer works on one round at a time: the clock starts when it can begin this one.
        deadline = max(awaited.start_s, self._last_reply_s) + self._group.timeout_s + _GRACE_S
        try:
            content = self._receive(f"round {awaited.round_id}", deadline)
        except PeerLost as error:
            self._group.abort(error.reason)
            raise self._lost(awaited.round_id, error.reason) from error
        prefix = wire.decode_prefix(content, epoch=self._group.epoch)
        if prefix.kind is wire.Kind.CLOSE:
            raise self._lost(awaited.round_id, "it closed the channel")
        return wire.decode_reply(prefix, content)

    def _lost(self, round_id: int, reason: str) -> PeerLost:
        return self._group.lost(
            self._to, operation=f"round {round_id}", reason=reason, round_id=round_id
        )

    def _receive(self, operation: str, deadline: float) -> memoryview:
        return self._group.receive_message(
            source=self._to,
            tag=Tag.REPLY,
            operation=operation,
            timeout_s=max(deadline - time.monotonic(), _GRACE_S),  # it may be asked for late
        )

    def _say_goodbye(self) -> None:
        """Waits for the answer to the last message; replies to rounds may come before it."""
        deadline = time.monotonic() + self._group.timeout_s
        operation = "closing the channel"
        message = wire.encode_close(epoch=self._group.epoch)
        self._group.send_message(
            message.buffers, to=self._to, tag=Tag.ROUND, operation=operation
        ).finish(timeout_s=self._group.timeout_s)
        kind = wire.Kind.REPLY
        while kind is not wire.Kind.CLOSE:
            content = self._receive(operation, deadline)
            kind = wire.decode_prefix(content, epoch=self._group.epoch).kind


class DistRoundSource:
    """Verify rank 0's end; the group's other rank is the draft stage."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._from = _only_peer(group)
        self._closed = False
        self._replying: Transfer | None = None

    @property
    def peer(self) -> str:
        return self._group.members[self._from]

    def next_round(self) -> Round | None:
        if self._closed:
            return None
        self._group.doing(None)
        content = self._group.receive_message(
            source=self._from, tag=Tag.ROUND, operation="waiting for a round", timeout_s=None
        )
        prefix = wire.decode_prefix(content, epoch=self._group.epoch)
        self._group.doing(prefix.round_id)
        if prefix.kind is wire.Kind.CLOSE:
            self._closed = True
            self._say_goodbye()
            return None
        operation = f"round {prefix.round_id}"

        def receive(x: Tensor) -> Tensor:
            return self._group.recv(x, source=self._from, tag=Tag.ROUND, operation=operation)

        return _round_of(prefix, content, receive, device=self._group.device)

    def reply(self, reply: VerifyReply) -> None:
        self._group.check()  # an aborted transfer leaves garbage and raises nothing
        message = wire.encode_reply(reply, epoch=self._group.epoch)
        # The draft end may compute, and read a large reply later: the next round is not to wait.
        self._finish_reply()
        self._replying = self._group.send_message(
            message.buffers,
            to=self._from,
            tag=Tag.REPLY,
            operation=f"the reply to round {reply.round_id}",
        )

    def _say_goodbye(self) -> None:
        self._finish_reply()
        message = wire.encode_close(epoch=self._group.epoch)
        self._group.send_message(
            message.buffers,
            to=self._from,
            tag=Tag.REPLY,
            operation="closing the channel",
            confirmed=True,
        ).finish(timeout_s=self._group.timeout_s)

    def _finish_reply(self) -> None:
        if self._replying is not None:
            self._replying.finish(timeout_s=self._group.timeout_s)
            self._replying = None


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
        transfers += group.start_broadcast(x)
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
    group.doing(None)
    content = group.receive_message(
        source=0, tag=Tag.SHARE, operation="waiting for a shared round", timeout_s=None
    )
    prefix = wire.decode_prefix(content, epoch=group.epoch)
    if prefix.kind is wire.Kind.CLOSE:
        return None
    group.doing(prefix.round_id)
    return _round_of(prefix, content, group.broadcast, device=group.device)


def _to_followers(
    group: ProcessGroup, message: wire.Message, *, operation: str, is_last: bool = False
) -> list[Transfer]:
    assert group.rank == 0, f"rank {group.rank} shares a round, only rank 0 may"
    return [
        group.send_message(
            message.buffers, to=follower, tag=Tag.SHARE, operation=operation, confirmed=is_last
        )
        for follower in range(1, group.size)
    ]


def _round_of(
    prefix: wire.Prefix,
    content: memoryview,
    receive: Callable[[Tensor], Tensor],
    *,
    device: torch.device,
) -> Round:
    """Returns the round of a message; receives tensors that it does not hold."""
    header = wire.decode_round(prefix, content)
    hidden_TD, draft_probs_KV = wire.receive_tensors(prefix, content, receive, device=device)
    if hidden_TD is None:
        raise WireError(f"found no hidden states in round {prefix.round_id}, expected a matrix")
    return header, hidden_TD, draft_probs_KV


def _only_peer(group: ProcessGroup) -> int:
    assert group.size == 2, f"a channel joins 2 ranks, group {group.name} has {group.size}"
    return 1 - group.rank
