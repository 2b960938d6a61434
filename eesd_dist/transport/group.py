"""Ranks that talk: transfers and collectives with deadlines whose errors name the peer.

`SingleGroup` is a stage of one rank. `ProcessGroup` joins the processes of one generation: tensors
on the CPU go over Gloo, tensors on a GPU over NCCL, and callers do not see which. It never touches
torch's process-global default group.

On the CPU a collective is a handful of point-to-point transfers: each wait knows whom it waits for
(so PeerLost names one peer), it skips Gloo's worker thread, and sums are always taken in rank
order, in float32 for narrower types, whatever the size of the tensor. So all ranks hold the same
bits, and a row's sum does not depend on the rows beside it (`numerics: invariant`).

RuntimeErrors of torch become PeerLost in one place, `ProcessGroup.peer_lost`.
"""

import logging
import time
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed import Work

from eesd_dist.errors import PeerLost
from eesd_dist.transport.gloo import GlooPlane, wait
from eesd_dist.transport.nccl import NcclPlane

logger = logging.getLogger(__name__)

_WHOLE_BYTES = 256 * 1024
"""Up to here every rank sends everything to every other; above, each rank sums one share."""


class Tag(IntEnum):
    """Streams of messages between one pair of ranks; each keeps its own order."""

    COLLECTIVE = 0
    ROUND = 1
    REPLY = 2
    SHARE = 3


class SingleGroup:
    """A stage of one rank: nothing to exchange."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return x


class Transfer:
    """One send or receive under way. The tensor belongs to it until `finish` returns."""

    def __init__(
        self, group: "ProcessGroup", work: Work | None, x: Tensor, *, peer: int, operation: str
    ) -> None:
        self._group = group
        self._work = work
        self._x = x
        self._peer = peer
        self._operation = operation

    def finish(self, *, timeout_s: float | None) -> Tensor:
        """Waits for the transfer; None waits as long as the peer lives."""
        if self._work is None:  # on a GPU: ordered on the stream, watched by the plane
            self._group.check()
            return self._x
        try:
            wait(self._work, timeout_s=timeout_s)
        except RuntimeError as error:
            raise self._group.peer_lost(
                error, peer=self._peer, operation=self._operation
            ) from error
        return self._x


class ProcessGroup:
    """The processes of one generation that hold a stage, or the two ends of a channel."""

    def __init__(
        self,
        *,
        name: str,
        generation: int,
        rank: int,
        members: Sequence[str],
        timeout_s: float,
        device: torch.device,
        gloo: GlooPlane,
        nccl: NcclPlane | None = None,
    ) -> None:
        self.name = name
        self.generation = generation
        self.members = tuple(members)
        self.timeout_s = timeout_s
        self.device = device
        self._rank = rank
        self._others = [peer for peer in range(len(members)) if peer != rank]
        self._gloo = gloo
        self._nccl = nccl
        self._aborted: str | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self.members)

    def isend(self, x: Tensor, *, to: int, tag: Tag, operation: str) -> Transfer:
        """Starts sending; `x` must not change before the transfer is finished."""
        x = x.contiguous()
        if x.is_cuda:
            self._on_device(operation).isend(x, to=to, operation=operation)
            return Transfer(self, None, x, peer=to, operation=operation)
        try:
            work = self._gloo.isend(x, to=to, tag=tag)
        except RuntimeError as error:
            raise self.peer_lost(error, peer=to, operation=operation) from error
        return Transfer(self, work, x, peer=to, operation=operation)

    def irecv(self, x: Tensor, *, source: int, tag: Tag, operation: str) -> Transfer:
        """Starts receiving into `x`, which must be contiguous."""
        if x.is_cuda:
            self._on_device(operation).recv(x, source=source, operation=operation)
            return Transfer(self, None, x, peer=source, operation=operation)
        try:
            work = self._gloo.irecv(x, source=source, tag=tag)
        except RuntimeError as error:
            raise self.peer_lost(error, peer=source, operation=operation) from error
        return Transfer(self, work, x, peer=source, operation=operation)

    def send(self, x: Tensor, *, to: int, tag: Tag = Tag.COLLECTIVE, operation: str) -> None:
        self.isend(x, to=to, tag=tag, operation=operation).finish(timeout_s=self.timeout_s)

    def recv(self, x: Tensor, *, source: int, tag: Tag = Tag.COLLECTIVE, operation: str) -> Tensor:
        transfer = self.irecv(x, source=source, tag=tag, operation=operation)
        return transfer.finish(timeout_s=self.timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums in place, in rank order; the same bits on every rank."""
        if self.size == 1:
            return x
        if x.is_cuda:
            self._on_device("all_reduce").all_reduce(x, operation="all_reduce")
            return x
        total = x.contiguous()
        if self.size == 2 or total.nbytes <= _WHOLE_BYTES:
            _sum_into(total, self._exchange(total, operation="all_reduce"))
        else:
            self._sum_by_shares(total.view(-1))
        return x if total is x else x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if x.is_cuda:
            parts = [torch.empty_like(x) for _ in self.members]
            self._on_device("all_gather").all_gather(parts, x, operation="all_gather")
            return parts
        return self._exchange(x.contiguous(), operation="all_gather")

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        """`source`'s x on every rank; receivers' x must be contiguous and is overwritten."""
        if self.size == 1 or x.numel() == 0:
            return x
        if x.is_cuda:
            self._on_device("broadcast").broadcast(x, source=source, operation="broadcast")
            return x
        if self._rank != source:
            return self.recv(x, source=source, operation="broadcast")
        self._finish([self._start_send(x, to=peer, operation="broadcast") for peer in self._others])
        return x

    def check(self) -> None:
        """Raises PeerLost when work on the GPU was given up; its results must not be used."""
        if self._nccl is not None and self._nccl.lost is not None:
            raise PeerLost(
                peer=self._everyone_else(),
                operation=self._nccl.lost,
                reason=f"no answer within {self.timeout_s:g} s",
            )

    def abort(self, reason: str = "the group was aborted") -> None:
        """Wakes every thread that waits in this group, here and at the peers. From any thread."""
        if self._aborted is None:
            self._aborted = reason
            logger.info(
                "group aborted: group=%s generation=%d reason=%s",
                self.name, self.generation, reason,
            )  # fmt: skip
        self._gloo.abort()
        if self._nccl is not None:
            self._nccl.abort()

    def peer_lost(self, error: RuntimeError, *, peer: int, operation: str) -> PeerLost:
        reason = self._aborted or _reason(error, timeout_s=self.timeout_s)
        return PeerLost(peer=self.members[peer], operation=operation, reason=reason)

    def _exchange(self, x: Tensor, *, operation: str) -> list[Tensor]:
        """Every rank's x, in rank order; our own is x itself."""
        parts = [x if peer == self._rank else torch.empty_like(x) for peer in range(self.size)]
        receives = [
            self._start_recv(parts[peer], source=peer, operation=operation) for peer in self._others
        ]
        sends = [self._start_send(x, to=peer, operation=operation) for peer in self._others]
        self._finish(receives + sends)
        return parts

    def _sum_by_shares(self, flat: Tensor) -> None:
        """Each rank sums one share of x for all: less to send than an exchange, the same bits."""
        shares = list(flat.tensor_split(self.size))
        mine = shares[self._rank]
        parts = [
            mine if peer == self._rank else torch.empty_like(mine) for peer in range(self.size)
        ]
        receives = [
            self._start_recv(parts[peer], source=peer, operation="all_reduce")
            for peer in self._others
        ]
        sends = [
            self._start_send(shares[peer], to=peer, operation="all_reduce") for peer in self._others
        ]
        self._finish(receives + sends)
        _sum_into(mine, parts)
        receives = [
            self._start_recv(shares[peer], source=peer, operation="all_reduce")
            for peer in self._others
        ]
        sends = [self._start_send(mine, to=peer, operation="all_reduce") for peer in self._others]
        self._finish(receives + sends)

    def _start_send(self, x: Tensor, *, to: int, operation: str) -> Transfer:
        return self.isend(x, to=to, tag=Tag.COLLECTIVE, operation=operation)

    def _start_recv(self, x: Tensor, *, source: int, operation: str) -> Transfer:
        return self.irecv(x, source=source, tag=Tag.COLLECTIVE, operation=operation)

    def _finish(self, transfers: Sequence[Transfer]) -> None:
        finish_all(transfers, timeout_s=self.timeout_s)

    def _on_device(self, operation: str) -> NcclPlane:
        assert self._nccl is not None, f"{operation} of a CUDA tensor in a group built for the CPU"
        self.check()
        return self._nccl

    def _everyone_else(self) -> str:
        return " or ".join(self.members[peer] for peer in self._others) or self.members[self._rank]


def finish_all(transfers: Sequence[Transfer], *, timeout_s: float) -> None:
    """Waits for all of them within one deadline."""
    deadline = time.monotonic() + timeout_s
    for transfer in transfers:
        transfer.finish(timeout_s=deadline - time.monotonic())


def _sum_into(total: Tensor, parts: Sequence[Tensor]) -> None:
    """total = parts[0] + parts[1] + ..., one after the other and rounded once."""
    wide = torch.promote_types(total.dtype, torch.float32)
    running = parts[0].to(wide if total.is_floating_point() else total.dtype, copy=True)
    for part in parts[1:]:
        running += part
    total.copy_(running)


_GONE = ("closed by peer", "onnection reset", "roken pipe", "pair closure", "ocket closed")


def _reason(error: RuntimeError, *, timeout_s: float) -> str:
    """Gloo's sentence in our words: what a person needs to know, then the first line of its own."""
    text = str(error).strip()
    said = text.splitlines()[0][:200] if text else type(error).__name__
    if "imed out" in said:
        return f"no answer within {timeout_s:g} s"
    if any(sign in said for sign in _GONE):
        return f"its connection is gone ({said})"
    return f"its link failed ({said})"
