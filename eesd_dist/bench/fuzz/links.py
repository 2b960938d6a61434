"""Channels to a verify stage in this process, with injected faults.

`FutureChannel` verifies in a separate thread, so that replies arrive at any time. `FaultyChannel`
wraps any channel and loses the peer on request.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone

from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import RoundHeader, VerifyChannel, VerifyReply
from eesd_dist.transport.memory import Verify, expect_round

ON_PURPOSE = "lost on purpose"
"""Part of the reason of every injected loss."""
_PEER = "verify stage in this process"


class FutureChannel:
    """Channel that verifies rounds one after the other in a separate thread."""

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

    def close(self) -> None:
        """Waits until no round is being verified."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._outstanding.clear()


class FaultyChannel:
    """A channel that loses its peer at a chosen round."""

    def __init__(self, inner: VerifyChannel) -> None:
        self._inner = inner
        self._left: dict[str, int] = {}
        """Remaining operations before the loss, by name; other operations never fail."""

    @property
    def peer(self) -> str:
        return self._inner.peer

    def lose_at(self, operation: str, *, after: int) -> None:
        """Loses the peer at a `send` or `receive`, after `after` more of them."""
        self._left[operation] = after

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        self._lose("send")
        return self._inner.send(header, hidden_TD, draft_probs_KV)

    def receive(self) -> VerifyReply:
        self._lose("receive")
        return self._inner.receive()

    def close(self) -> None:
        self._inner.close()

    def _lose(self, operation: str) -> None:
        left = self._left.get(operation)
        if left == 0:
            raise PeerLost(peer=self.peer, operation=operation, reason=ON_PURPOSE)
        if left is not None:
            self._left[operation] = left - 1


def encoded(verify: Verify) -> Verify:
    """Wraps `verify`: encodes and decodes round and reply as between processes."""

    def verify_what_arrives(
        header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
    ) -> VerifyReply:
        epoch = header.epoch
        content = wire.encode_round(header, hidden_TD, draft_probs_KV).joined()
        prefix = wire.decode_prefix(content, epoch=epoch)
        arrived = wire.decode_round(prefix, content)
        if prefix.tensors_are_inline:
            inline_TD, draft_probs_KV = wire.inline_tensors(prefix, content)
            assert inline_TD is not None, "a round has rows"
            hidden_TD = inline_TD
        reply = verify(arrived, hidden_TD, draft_probs_KV)
        content = wire.encode_reply(reply, epoch=epoch).joined()
        prefix = wire.decode_prefix(content, epoch=epoch)
        return wire.decode_reply(prefix, content)

    return verify_what_arrives
