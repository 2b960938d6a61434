"""Ranks that talk: transfers and collectives with deadlines whose errors name the peer.

`SingleGroup` is a stage of one rank. `ProcessGroup` joins the processes of one generation: tensors
on the CPU go over Gloo, tensors on a GPU over NCCL, and callers do not see which. It never touches
torch's process-global default group.

On the CPU a collective is a handful of point-to-point transfers: each wait knows whom it waits for
(so PeerLost names one peer), it skips Gloo's worker thread, and sums are always taken in rank
order, in float32 for narrower types, whatever the size of the tensor. So all ranks hold the same
bits, and a row's sum does not depend on the rows beside it (`numerics: invariant`).

RuntimeErrors of torch become PeerLost: on the CPU in `ProcessGroup.peer_lost`, on a GPU in
`_on_device`; what a computation raises after work was given up, in `names_who_is_lost`. Every
operation is counted by its kind: how many, bytes each way, seconds waited. A wait without a
deadline is nobody's fault (there is no round to work on) and is not counted.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from eesd_dist.errors import PeerLost
from eesd_dist.transport.gloo import GlooPlane, Pending
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.types import NO_TRAFFIC, Traffic

logger = logging.getLogger(__name__)

_WHOLE_BYTES = 256 * 1024
"""Up to here every rank sends everything to every other; above, each rank sums one share."""


class Tag(IntEnum):
    """Streams of messages between one pair of ranks; each keeps its own order."""

    COLLECTIVE = 0
    ROUND = 1
    REPLY = 2
    SHARE = 3
    PAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCounts:
    """One kind of operation, since its group was built."""

    number: int
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """What one rank has done in its group so far.

    On the CPU bytes are those handed to the sockets. On a GPU they are what a ring would send,
    since NCCL does not tell, and seconds are not measured.
    """

    by_kind: Mapping[str, OperationCounts]
    """`all_reduce`, `all_gather`, `broadcast`, and one kind for each stream of messages."""

    @property
    def total(self) -> Traffic:
        return _added([each.traffic for each in self.by_kind.values()])


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

    def counts(self) -> GroupCounts:
        return GroupCounts(by_kind={})


class EmptySeat:
    """A place in a stage whose ranks have not met: weights may be loaded for it, and that is all.

    A stage of one rank has nobody to meet.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise self._alone("all_reduce")

    def all_gather(self, x: Tensor) -> list[Tensor]:
        raise self._alone("all_gather")

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        raise self._alone("broadcast")

    def counts(self) -> GroupCounts:
        return GroupCounts(by_kind={})

    def _alone(self, operation: str) -> PeerLost:
        return PeerLost(
            peer=f"the other {self._size - 1} ranks",
            operation=operation,
            reason="they have not met: join a generation first",
        )


class LatestGroup:
    """A rank's place in its stage, whoever sits at the others: weights are loaded once and go from
    one generation's group to the next."""

    def __init__(self, group: "SingleGroup | EmptySeat | ProcessGroup") -> None:
        self._rank, self._size = group.rank, group.size
        self._group = group

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def current(self) -> "SingleGroup | EmptySeat | ProcessGroup":
        return self._group

    def join(self, group: "SingleGroup | EmptySeat | ProcessGroup") -> None:
        """The next generation: the same place among as many."""
        assert (group.rank, group.size) == (self._rank, self._size), "a shard belongs to its place"
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._group.all_gather(x)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return self._group.broadcast(x, source=source)

    def counts(self) -> GroupCounts:
        """Of the present generation."""
        return self._group.counts()


class _Tally:
    """The running counts of one kind of operation; written by one thread at a time."""

    __slots__ = ("kind", "number", "received_bytes", "sent_bytes", "wait_s")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.number = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.wait_s = 0.0

    def read(self) -> OperationCounts:
        return OperationCounts(
            number=self.number,
            traffic=Traffic(
                sent_bytes=self.sent_bytes,
                received_bytes=self.received_bytes,
                wait_s=self.wait_s,
            ),
        )


class Transfer:
    """One send or receive under way. The tensor belongs to it until `finish` returns."""

    __slots__ = ("_arrivals", "_group", "_operation", "_peer", "_pending", "_tally", "_x")

    def __init__(
        self,
        group: "ProcessGroup",
        pending: Pending | None,
        x: Tensor,
        *,
        peer: int,
        operation: str,
        tally: _Tally,
        arrivals: int | None = None,
    ) -> None:
        """`arrivals`: of something received, how many operations it completes; None: it is sent."""
        self._arrivals = arrivals
        self._group = group
        self._pending = pending
        self._x = x
        self._peer = peer
        self._operation = operation
        self._tally = tally

    def finish(self, *, timeout_s: float | None) -> Tensor:
        """Waits for the transfer; None waits as long as the peer lives."""
        if self._pending is None:  # on a GPU: ordered on the stream, watched by the plane
            self._group.check()
            self._count()
            return self._x
        started_s = time.perf_counter()
        try:
            self._pending.wait(timeout_s=timeout_s)
        except RuntimeError as error:
            raise self._group.peer_lost(
                error,
                peer=self._peer,
                operation=self._operation,
                waited_s=time.perf_counter() - started_s,
            ) from error
        if timeout_s is not None:
            self._tally.wait_s += time.perf_counter() - started_s
        self._count()
        return self._x

    def _count(self) -> None:
        if self._arrivals is not None:
            self._tally.received_bytes += self._x.nbytes
            self._tally.number += self._arrivals


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
        self._round_id: int | None = None
        self._of_round = ""
        self._all_reduce = _Tally("all_reduce")
        self._all_gather = _Tally("all_gather")
        self._broadcast = _Tally("broadcast")
        self._by_tag = {tag: _Tally(tag.name.lower()) for tag in Tag}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self.members)

    def doing(self, number: int | None, *, of: str = "round") -> None:
        """Which round the collectives to come belong to, for errors to say; None: to none. Another
        word than `round` where a stage counts something else."""
        self._round_id = number if of == "round" else None
        self._of_round = "" if number is None else f" of {of} {number}"

    def counts(self) -> GroupCounts:
        """A snapshot; from any thread."""
        tallies = (self._all_reduce, self._all_gather, self._broadcast, *self._by_tag.values())
        return GroupCounts(by_kind={tally.kind: tally.read() for tally in tallies if tally.number})

    def isend(
        self, x: Tensor, *, to: int, tag: Tag, operation: str, confirmed: bool = False
    ) -> Transfer:
        """Starts sending; `x` must not change before the transfer is finished.

        On the CPU small messages are on their own from here, and finished at once: only of a
        `confirmed` one it is known by then that the peer has asked for it. Before a group is left,
        the last message has to be.
        """
        tally = self._by_tag[tag]
        tally.number += 1
        return self._start_send(
            x.contiguous(), to=to, tag=tag, operation=operation, tally=tally, confirmed=confirmed
        )

    def irecv(self, x: Tensor, *, source: int, tag: Tag, operation: str) -> Transfer:
        """Starts receiving into `x`, which must be contiguous."""
        tally = self._by_tag[tag]
        return self._start_recv(
            x, source=source, tag=tag, operation=operation, tally=tally, arrivals=1
        )

    def send(self, x: Tensor, *, to: int, tag: Tag = Tag.COLLECTIVE, operation: str) -> None:
        """Returns when the peer has asked for it."""
        transfer = self.isend(x, to=to, tag=tag, operation=operation, confirmed=True)
        transfer.finish(timeout_s=self.timeout_s)

    def recv(self, x: Tensor, *, source: int, tag: Tag = Tag.COLLECTIVE, operation: str) -> Tensor:
        transfer = self.irecv(x, source=source, tag=tag, operation=operation)
        return transfer.finish(timeout_s=self.timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums in place, in rank order; the same bits on every rank."""
        if self.size == 1:
            return x
        tally = self._all_reduce
        tally.number += 1
        if x.is_cuda:
            operation = tally.kind + self._of_round
            with self._on_device(operation) as plane:
                plane.all_reduce(x, operation=operation)
            ring = 2 * x.nbytes * (self.size - 1) // self.size
            tally.sent_bytes += ring
            tally.received_bytes += ring
            return x
        total = x.contiguous()
        if self.size == 2 or total.nbytes <= _WHOLE_BYTES:
            _sum_into(total, self._exchange(total, tally=tally))
        else:
            self._sum_by_shares(total.view(-1), tally=tally)
        return x if total is x else x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        tally = self._all_gather
        tally.number += 1
        if x.is_cuda:
            operation = tally.kind + self._of_round
            parts = [torch.empty_like(x) for _ in self.members]
            with self._on_device(operation) as plane:
                plane.all_gather(parts, x, operation=operation)
            tally.sent_bytes += x.nbytes * len(self._others)
            tally.received_bytes += x.nbytes * len(self._others)
            return parts
        return self._exchange(x.contiguous(), tally=tally)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        """`source`'s x on every rank; receivers' x must be contiguous and is overwritten."""
        finish_all(self.start_broadcast(x, source=source), timeout_s=self.timeout_s)
        return x

    def start_broadcast(self, x: Tensor, *, source: int = 0) -> list[Transfer]:
        """A broadcast under way: `x` is whole, and may change, when its transfers are finished."""
        if self.size == 1 or x.numel() == 0:
            return []
        tally = self._broadcast
        tally.number += 1
        operation = tally.kind + self._of_round
        if x.is_cuda:
            with self._on_device(operation) as plane:
                plane.broadcast(x, source=source, operation=operation)
            if self._rank == source:
                tally.sent_bytes += x.nbytes
            else:
                tally.received_bytes += x.nbytes
            return []
        if self._rank != source:
            return [self._start_recv(x, source=source, operation=operation, tally=tally)]
        return [
            self._start_send(x, to=peer, operation=operation, tally=tally) for peer in self._others
        ]

    def check(self) -> None:
        """Raises PeerLost when work on the GPU was given up; its results must not be used."""
        if self._nccl is not None and self._nccl.lost is not None:
            raise PeerLost(
                peer=self._everyone_else(),
                operation=self._nccl.lost,
                reason=f"no answer within {self.timeout_s:g} s",
                round_id=self._round_id,
                generation=self.generation,
            )

    @contextmanager
    def names_who_is_lost(self) -> Iterator[None]:
        """Around a rank's loop: once work on the GPU was given up its results are garbage, and
        whatever is raised over them is that peer's loss."""
        try:
            yield
        except Exception:
            self.check()
            raise

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

    def peer_lost(
        self, error: RuntimeError, *, peer: int, operation: str, waited_s: float = 0.0
    ) -> PeerLost:
        reason = self._aborted or _reason(error, timeout_s=self.timeout_s, waited_s=waited_s)
        return self.lost(peer, operation=operation, reason=reason, round_id=self._round_id)

    def lost(self, peer: int, *, operation: str, reason: str, round_id: int | None) -> PeerLost:
        """The error that names this member of the group."""
        return PeerLost(
            peer=self.members[peer],
            operation=operation,
            reason=reason,
            round_id=round_id,
            generation=self.generation,
        )

    def _exchange(self, x: Tensor, *, tally: _Tally) -> list[Tensor]:
        """Every rank's x, in rank order; our own is x itself."""
        operation = tally.kind + self._of_round
        parts = [x if peer == self._rank else torch.empty_like(x) for peer in range(self.size)]
        self._swap([x] * self.size, parts, operation=operation, tally=tally)
        return parts

    def _sum_by_shares(self, flat: Tensor, *, tally: _Tally) -> None:
        """Each rank sums one share of x for all: less to send than an exchange, the same bits."""
        operation = tally.kind + self._of_round
        shares = list(flat.tensor_split(self.size))
        mine = shares[self._rank]
        parts = [
            mine if peer == self._rank else torch.empty_like(mine) for peer in range(self.size)
        ]
        self._swap(shares, parts, operation=operation, tally=tally)
        _sum_into(mine, parts)
        self._swap([mine] * self.size, shares, operation=operation, tally=tally)

    def _swap(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        operation: str,
        tally: _Tally,
    ) -> None:
        """outgoing[peer] to each peer, incoming[peer] from it, within one deadline."""
        receives = [
            self._start_recv(incoming[peer], source=peer, operation=operation, tally=tally)
            for peer in self._others
        ]
        sends = [
            self._start_send(outgoing[peer], to=peer, operation=operation, tally=tally)
            for peer in self._others
        ]
        finish_all(receives + sends, timeout_s=self.timeout_s)

    def _start_send(
        self,
        x: Tensor,
        *,
        to: int,
        operation: str,
        tally: _Tally,
        tag: Tag = Tag.COLLECTIVE,
        confirmed: bool = False,
    ) -> Transfer:
        tally.sent_bytes += x.nbytes
        pending: Pending | None = None
        if x.is_cuda:
            with self._on_device(operation, peer=to) as device_plane:
                device_plane.isend(x, to=to, operation=operation)
        else:
            with self._on_host(operation, peer=to) as plane:
                pending = plane.isend(x, to=to, tag=tag, confirmed=confirmed)
        return Transfer(self, pending, x, peer=to, operation=operation, tally=tally)

    def _start_recv(
        self,
        x: Tensor,
        *,
        source: int,
        operation: str,
        tally: _Tally,
        tag: Tag = Tag.COLLECTIVE,
        arrivals: int = 0,
    ) -> Transfer:
        pending: Pending | None = None
        if x.is_cuda:
            with self._on_device(operation, peer=source) as device_plane:
                device_plane.recv(x, source=source, operation=operation)
        else:
            with self._on_host(operation, peer=source) as plane:
                pending = plane.irecv(x, source=source, tag=tag)
        return Transfer(
            self, pending, x, peer=source, operation=operation, tally=tally, arrivals=arrivals
        )

    @contextmanager
    def _on_host(self, operation: str, *, peer: int) -> Iterator[GlooPlane]:
        try:
            yield self._gloo
        except RuntimeError as error:
            raise self.peer_lost(error, peer=peer, operation=operation) from error

    @contextmanager
    def _on_device(self, operation: str, *, peer: int | None = None) -> Iterator[NcclPlane]:
        """Where NCCL names nobody, and `peer` is None, the error names everyone else."""
        assert self._nccl is not None, f"{operation} of a CUDA tensor in a group built for the CPU"
        self.check()
        try:
            yield self._nccl
        except RuntimeError as error:
            self.check()  # it was late before, and this is what follows from that
            raise PeerLost(
                peer=self._everyone_else() if peer is None else self.members[peer],
                operation=operation,
                reason=self._aborted or _reason(error, timeout_s=self.timeout_s, waited_s=0.0),
                round_id=self._round_id,
                generation=self.generation,
            ) from error

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


def _added(parts: Sequence[Traffic]) -> Traffic:
    if not parts:
        return NO_TRAFFIC
    return Traffic(
        sent_bytes=sum(part.sent_bytes for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        wait_s=sum(part.wait_s for part in parts),
    )


_GONE = ("closed by peer", "onnection reset", "roken pipe", "pair closure", "ocket closed")


def _reason(error: RuntimeError, *, timeout_s: float, waited_s: float) -> str:
    """Gloo's sentence in our words: what a person needs to know, then the first line of its own."""
    text = str(error).strip()
    said = text.splitlines()[0][:200] if text else type(error).__name__
    if "imed out" in said:
        return f"no answer within {timeout_s:g} s"
    if any(sign in said for sign in _GONE):
        return f"its connection is gone, waited {waited_s:.1f} s ({said})"
    return f"its link failed, waited {waited_s:.1f} s ({said})"
