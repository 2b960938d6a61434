"""A channel between two stages on one GPU, through host memory.

NCCL needs one GPU per rank. The receiving end gets tensors on the CPU and moves them to the device
of its weights.
"""

import torch
from torch import Tensor

from eesd_dist.transport.contracts import (
    RoundHeader,
    RoundSource,
    VerifyChannel,
    VerifyReply,
)


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
