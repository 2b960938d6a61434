"""Channels to a verify stage in this process: as a process would be reached, and breakable.

`FutureChannel` verifies in a thread of its own, so that a reply is here when it is. `FaultyChannel`
stands around any channel, loses the peer when it is told to, and may deny for a while that a reply
is here, which makes the engine draft ahead at moments that repeat.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone

from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import RoundHeader, VerifyChannel, VerifyReply
from eesd_dist.transport.memory import Verify, expect_round

ON_PURPOSE = "lost on purpose"
"""Part of the reason of every loss that a case asked for."""
_PEER = "verify stage in this process"


class FutureChannel:
    """Rounds are verified one after the other in a thread beside the engine."""

    def __init__(self, verify: Verify, *, timeout_s: float) -> None:
        self._verify = verify
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._outstanding: deque[tuple[int, Future[VerifyReply]]] = deque()

    @property
    def peer(self) -> str:
        return _PEER

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        future = self._thread.submit(self._verify, header, hidden_TD, draft_probs_KV)
        self._outstanding.append((header.round_id, future))
        return hidden_TD.nbytes

    def receive(self) -> VerifyReply:
        if not self._outstanding:
            raise EngineError(f"no round is outstanding at {_PEER}: send one before receiving")
        round_id, future = self._outstanding.popleft()
        try:
            reply = future.result(self._timeout_s)
        except NotDone:
            raise PeerLost(
                peer=_PEER,
                operation=f"round {round_id}",
                reason=f"no reply within {self._timeout_s:g} s",
            ) from None
        expect_round(reply, round_id)
        return reply

    def reply_is_here(self) -> bool:
        return bool(self._outstanding) and self._outstanding[0][1].done()

    def close(self) -> None:
        """Returns when no round is being verified any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._outstanding.clear()


class FaultyChannel:
    """A channel that loses its peer at a chosen round."""

    def __init__(
        self, inner: VerifyChannel, *, announces: Callable[[], bool] | None = None
    ) -> None:
        """`announces`: whether a reply is said to be here; None asks the channel."""
        self._inner = inner
        self._announces = announces
        self._left: dict[str, int] = {}
        """Operations that still go well, by name; none is lost at those that are not named."""

    @property
    def peer(self) -> str:
        return self._inner.peer

    def lose_at(self, operation: str, *, after: int) -> None:
        """`send` or `receive`, after so many more of them."""
        self._left[operation] = after

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        self._lose("send")
        return self._inner.send(header, hidden_TD, draft_probs_KV)

    def receive(self) -> VerifyReply:
        self._lose("receive")
        return self._inner.receive()

    def reply_is_here(self) -> bool:
        if self._announces is None:
            return self._inner.reply_is_here()
        return self._announces()

    def close(self) -> None:
        self._inner.close()

    def _lose(self, operation: str) -> None:
        left = self._left.get(operation)
        if left == 0:
            raise PeerLost(peer=self.peer, operation=operation, reason=ON_PURPOSE)
        if left is not None:
            self._left[operation] = left - 1


def encoded(verify: Verify) -> Verify:
    """The same, with round and reply written and read as they travel between processes."""

    def verify_what_arrives(
        header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
    ) -> VerifyReply:
        epoch = header.epoch
        message = wire.encode_round(header, hidden_TD, draft_probs_KV)
        frame, overflow = message.frame.clone(), message.overflow
        prefix = wire.decode_prefix(frame, epoch=epoch)
        arrived = wire.decode_round(prefix, frame, overflow)
        if prefix.tensors_are_inline:
            found, draft_probs_KV = wire.inline_tensors(prefix, frame)
            assert found is not None, "a round has rows"
            hidden_TD = found
        reply = wire.encode_reply(verify(arrived, hidden_TD, draft_probs_KV), epoch=epoch)
        prefix = wire.decode_prefix(reply.frame, epoch=epoch)
        return wire.decode_reply(prefix, reply.frame, reply.overflow)

    return verify_what_arrives
