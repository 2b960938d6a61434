"""A channel between two stages on one GPU: what is sent goes through the host's memory.

NCCL wants a GPU for each rank. The receiving end gets tensors on the CPU and puts them where its
weights are.
"""

from torch import Tensor

from eesd_dist.transport.contracts import RoundHeader, VerifyChannel, VerifyReply


class ThroughHost:
    """A `VerifyChannel` over one that wants its tensors on the CPU."""

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

    def reply_is_here(self) -> bool:
        return self._channel.reply_is_here()

    def close(self) -> None:
        self._channel.close()
