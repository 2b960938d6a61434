"""The verify channel in one process, and channels through the host.

`MemoryChannel` calls the verifier in the thread that waits for the reply: nothing runs
concurrently, so a test repeats exactly. Nothing is copied: hidden states belong to the channel from
`send` until their reply.

A fallback may be on the GPU of its peer, and NCCL needs one GPU per rank: in a degraded epoch
tensors go through host memory, and the receiving end moves them to the device of its weights.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from eesd_dist.errors import EngineError, WireError
from eesd_dist.transport.contracts import (
    RoundHeader,
    RoundSource,
    VerifyChannel,
    VerifyReply,
)

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
        if self._closed:
            raise EngineError(
                f"the channel to {self._peer} is closed: round {header.round_id} cannot be sent"
            )
        self._outstanding.append((header, hidden_TD, draft_probs_KV))
        return hidden_TD.nbytes + (0 if draft_probs_KV is None else draft_probs_KV.nbytes)

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


def expect_round(reply: VerifyReply, round_id: int) -> None:
    """Raises WireError unless this is the reply to that round: replies come in round order."""
    if reply.round_id != round_id:
        raise WireError(f"found the reply to round {reply.round_id}, expected round {round_id}")


class ThroughHost:
    """A `VerifyChannel` that copies tensors to the CPU for the channel below it."""

    def __init__(self, channel: VerifyChannel) -> None:
        self._channel = channel

    @property
    def peer(self) -> str:
        return self._channel.peer

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        probs_KV = None if draft_probs_KV is None else draft_probs_KV.cpu()
        return self._channel.send(header, hidden_TD.cpu(), probs_KV)

    def receive(self) -> VerifyReply:
        return self._channel.receive()

    def close(self) -> None:
        self._channel.close()


class OntoDevice:
    """A `RoundSource` that moves rows from the host to a GPU."""

    def __init__(self, source: RoundSource, device: torch.device) -> None:
        self._source = source
        self._device = device

    def next_round(self) -> tuple[RoundHeader, Tensor, Tensor | None] | None:
        received = self._source.next_round()
        if received is None:
            return None
        header, hidden_TD, draft_probs_KV = received
        probs_KV = None if draft_probs_KV is None else draft_probs_KV.to(self._device)
        return header, hidden_TD.to(self._device), probs_KV

    def reply(self, reply: VerifyReply) -> None:
        self._source.reply(reply)
