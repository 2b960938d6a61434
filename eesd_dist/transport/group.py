"""Transfers and collectives between ranks, with deadlines and errors that name the peer.

`ProcessGroup` joins the processes of one epoch. Tensors on the CPU go over links, tensors on a GPU
over NCCL; callers do not see which. It never touches torch's process-global default group.

On the CPU a collective is a handful of point-to-point transfers, or a part of a compiled call of
ranks that share a host (`host_sums`). Each wait is for one peer, so PeerLost names it. Sums are
always taken as `rank_sums` says, whatever the size of the tensor. So all ranks hold the same bits,
and a row's sum does not depend on the other rows of the batch (`numerics: invariant`).

Errors of links and of NCCL become PeerLost in `ProcessGroup.peer_lost` and `_on_device`, errors of
computations on the results of aborted GPU work in `raises_lost_peers`. Errors that report a failure
of this rank's own device name this rank. Every operation is counted by its kind: number, bytes each
way, seconds waited. Waits without a deadline are not counted: there is no round to work on.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eesd_dist.devices import HOST
from eesd_dist.errors import PeerLost
from eesd_dist.transport.counts import (
    WHOLE_BYTES,
    CapturedCounts,
    GroupCounts,
    Tally,
    bytes_of_sum,
    captured_counts,
)
from eesd_dist.transport.failures import OWN_FAILURES, own_failure, reason_of
from eesd_dist.transport.host_sums import HostSums
from eesd_dist.transport.link import bytes_of
from eesd_dist.transport.link_plane import LinkPlane
from eesd_dist.transport.nccl import Cut, NcclPlane
from eesd_dist.transport.rank_sums import pairwise_sum
from eesd_dist.transport.transfers import Pending, Tag, Transfer, finish_all

logger = logging.getLogger(__name__)


class ProcessGroup:
    """The processes of one epoch that hold a stage, or the two ends of a channel."""

    def __init__(
        self,
        *,
        name: str,
        epoch: int,
        rank: int,
        members: Sequence[str],
        timeout_s: float,
        device: torch.device,
        links: LinkPlane,
        nccl: NcclPlane | None = None,
        host_sums: HostSums | None = None,
    ) -> None:
        """`host_sums`: sums inside of compiled calls, of ranks on one host."""
        self.name = name
        self.epoch = epoch
        self.members = tuple(members)
        self.timeout_s = timeout_s
        self.device = device
        self._rank = rank
        self._others = [peer for peer in range(len(members)) if peer != rank]
        self._links = links
        self._nccl = nccl
        self._host_sums = host_sums
        if host_sums is not None:
            links.call_when_gone(host_sums.end_waits_for)
        self._aborted: str | None = None
        self._number: int | None = None
        self._round_id: int | None = None
        self._of_round = ""
        self.contributed_unix_s = 0.0
        """Time when this rank began its part of the last sum or gathering, which the others wait
        for."""
        self._all_reduce = Tally("all_reduce")
        self._all_gather = Tally("all_gather")
        self._broadcast = Tally("broadcast")
        self._by_tag = {tag: Tally(tag.name.lower()) for tag in Tag}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def queues_transfers(self) -> bool:
        """True if transfers of tensors on its device are queued there: they end after what was
        queued before, and what is queued next begins after them."""
        return self._nccl is not None

    @property
    def size(self) -> int:
        return len(self.members)

    def doing(self, number: int | None, *, of: str = "round") -> None:
        """Sets the round that errors of the following collectives name; None: no round. `of` is the
        word for what is counted where that is not rounds."""
        self._number = number
        self._round_id = number if of == "round" else None
        self._of_round = "" if number is None else f" of {of} {number}"

    @property
    def number(self) -> int | None:
        """Number that `doing` was last called with. From any thread."""
        return self._number

    @property
    def is_aborted(self) -> bool:
        return self._aborted is not None

    def counts(self) -> GroupCounts:
        """Returns a snapshot. From any thread."""
        tallies = (self._all_reduce, self._all_gather, self._broadcast, *self._by_tag.values())
        return GroupCounts(by_kind={tally.kind: tally.read() for tally in tallies if tally.number})

    def isend(
        self, x: Tensor, *, to: int, tag: Tag, operation: str, confirmed: bool = False
    ) -> Transfer:
        """Starts sending; `x` must not change before the transfer is finished.

        On the CPU a message finishes when the kernel has it, before the peer has asked for it. A
        `confirmed` one finishes when the peer has taken it; the last message before leaving a group
        must be confirmed.
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
        """Sends `x` and waits until the peer has taken it."""
        transfer = self.isend(x, to=to, tag=tag, operation=operation, confirmed=True)
        transfer.finish(timeout_s=self.timeout_s)

    def recv(self, x: Tensor, *, source: int, tag: Tag = Tag.COLLECTIVE, operation: str) -> Tensor:
        self.irecv(x, source=source, tag=tag, operation=operation).finish(timeout_s=self.timeout_s)
        return x

    def send_message(
        self,
        buffers: Sequence[memoryview],
        *,
        to: int,
        tag: Tag,
        operation: str,
        confirmed: bool = False,
    ) -> Transfer:
        """Starts sending a message from the host to the host, like `isend`."""
        tally = self._by_tag[tag]
        tally.number += 1
        return self._start_message(
            buffers, to=to, tag=tag, operation=operation, tally=tally, confirmed=confirmed
        )

    def receive_message(
        self, *, source: int, tag: Tag, operation: str, timeout_s: float | None
    ) -> memoryview:
        """Returns the next message with this tag; None waits as long as the peer lives. The wait is
        not counted: until a message comes there may be nothing to do. Raises PeerLost."""
        started_s = time.perf_counter()
        try:
            content = self._links.receive(source=source, tag=tag, timeout_s=timeout_s)
        except OSError as error:
            waited_s = time.perf_counter() - started_s
            raise self.peer_lost(
                error, peer=source, operation=operation, waited_s=waited_s
            ) from error
        tally = self._by_tag[tag]
        tally.number += 1
        tally.received_bytes += content.nbytes
        return content

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum in pairs, the same bits on every rank; on the CPU in place."""
        if self.size == 1:
            return x
        tally = self._all_reduce
        tally.number += 1
        self.contributed_unix_s = time.time()
        if x.device != HOST:
            operation = tally.kind + self._of_round
            with self._on_device(operation) as plane:
                total = plane.all_reduce(x, operation=operation)
            moved_bytes = bytes_of_sum(x.nbytes, size=self.size)
            tally.sent_bytes += moved_bytes
            tally.received_bytes += moved_bytes
            return total
        total = x.contiguous()
        if self.size == 2 or total.nbytes <= WHOLE_BYTES:
            total.copy_(pairwise_sum(self._exchange(total, tally=tally)))
        else:
            self._sum_by_shares(total.view(-1), tally=tally)
        return x if total is x else x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        tally = self._all_gather
        tally.number += 1
        self.contributed_unix_s = time.time()
        if x.device != HOST:
            operation = tally.kind + self._of_round
            with self._on_device(operation) as plane:
                contributions = plane.all_gather(x, operation=operation)
            tally.sent_bytes += x.nbytes * len(self._others)
            tally.received_bytes += x.nbytes * len(self._others)
            return list(contributions.unbind())
        return self._exchange(x.contiguous(), tally=tally)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        """Returns `source`'s x on every rank. Overwrites receivers' x, which must be contiguous."""
        finish_all(self.start_broadcast(x, source=source), timeout_s=self.timeout_s)
        return x

    def start_broadcast(self, x: Tensor, *, source: int = 0) -> list[Transfer]:
        """Starts a broadcast: `x` is complete, and may change, when the transfers are finished."""
        if self.size == 1 or x.numel() == 0:
            return []
        tally = self._broadcast
        tally.number += 1
        operation = tally.kind + self._of_round
        if x.device != HOST:
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

    @property
    def sums_on_host(self) -> bool:
        """True if compiled calls sum over the ranks. The same on every rank."""
        return self._host_sums is not None

    @property
    def host_sums(self) -> HostSums:
        """Sums inside of compiled calls; call `finish_sums` after each call."""
        assert self._host_sums is not None, "the ranks of this group sum by messages"
        return self._host_sums

    def finish_sums(self) -> None:
        """Counts the sums of a compiled call. Raises PeerLost if a rank was lost."""
        sums = self.host_sums
        sums.count(self._all_reduce)
        self.contributed_unix_s = max(self.contributed_unix_s, sums.contributed_unix_s)
        lost = sums.lost
        if lost is not None:
            raise self.lost(
                lost.rank,
                operation=self._all_reduce.kind + self._of_round,
                reason=self._aborted or lost.reason,
                round_id=self._round_id,
            )

    @contextmanager
    def capturing(self, cut: Cut) -> Iterator[CapturedCounts]:
        """Encloses what a CUDA graph captures, of use in this epoch only: this group's work is not
        done yet, and not counted. Work that the graph cannot hold is given to `cut`. A rank may
        replay the graph while another one launches its kernels. Yields its counts."""
        assert self._nccl is not None, "graphs of a group built for the host"
        with (
            captured_counts((self._all_reduce, self._all_gather)) as captured,
            self._nccl.capturing(cut),
        ):
            yield captured

    @contextmanager
    def replaying(self, captured: CapturedCounts) -> Iterator[str]:
        """Encloses the queueing of a replay: counts its work, and gives it its deadline. Yields the
        name of the operation. Raises PeerLost."""
        operation = "replay" + self._of_round
        with self._on_device(operation) as plane:
            yield operation
            plane.watch_queued(operation=operation)
        captured.add()
        self.contributed_unix_s = time.time()

    def check(self) -> None:
        """Raises PeerLost when work on the GPU was aborted; its results must not be used."""
        if self._nccl is not None and self._nccl.lost is not None:
            raise PeerLost(
                peer=self._names_of_others(),
                operation=self._nccl.lost,
                reason=f"its communicator failed, or no answer within {self.timeout_s:g} s",
                round_id=self._round_id,
                epoch=self.epoch,
            )

    @contextmanager
    def raises_lost_peers(self) -> Iterator[None]:
        """Wraps a rank's loop: once work on the GPU was aborted its results are garbage, and any
        error over them is raised as PeerLost."""
        try:
            yield
        except Exception:
            self.check()
            raise

    def abort(self, reason: str = "the group was aborted") -> None:
        """Ends every wait in this group, here and at the peers. From any thread."""
        if self._aborted is None:
            self._aborted = reason
            logger.info(
                "group aborted: group=%s epoch=%d reason=%s",
                self.name, self.epoch, reason,
            )  # fmt: skip
        self._links.abort()
        if self._host_sums is not None:
            self._host_sums.abort()
        if self._nccl is not None:
            self._nccl.abort()

    def peer_lost(
        self, error: OSError, *, peer: int, operation: str, waited_s: float = 0.0
    ) -> PeerLost:
        reason = self._aborted or reason_of(error, timeout_s=self.timeout_s, waited_s=waited_s)
        return self.lost(peer, operation=operation, reason=reason, round_id=self._round_id)

    def lost(self, peer: int, *, operation: str, reason: str, round_id: int | None) -> PeerLost:
        """Returns the error that names this member of the group."""
        return PeerLost(
            peer=self.members[peer],
            operation=operation,
            reason=reason,
            round_id=round_id,
            epoch=self.epoch,
        )

    def _exchange(self, x: Tensor, *, tally: Tally) -> list[Tensor]:
        """Returns every rank's x, in rank order; this rank's part is x itself."""
        operation = tally.kind + self._of_round
        contributions = [
            x if peer == self._rank else torch.empty_like(x) for peer in range(self.size)
        ]
        self._swap([x] * self.size, contributions, operation=operation, tally=tally)
        return contributions

    def _sum_by_shares(self, flat: Tensor, *, tally: Tally) -> None:
        """Sums with one share of x per rank: sends less than an exchange, with the same bits."""
        operation = tally.kind + self._of_round
        shares = list(flat.tensor_split(self.size))
        own_share = shares[self._rank]
        contributions = [
            own_share if peer == self._rank else torch.empty_like(own_share)
            for peer in range(self.size)
        ]
        self._swap(shares, contributions, operation=operation, tally=tally)
        own_share.copy_(pairwise_sum(contributions))
        self._swap([own_share] * self.size, shares, operation=operation, tally=tally)

    def _swap(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        operation: str,
        tally: Tally,
    ) -> None:
        """Sends outgoing[peer] and receives incoming[peer] for each peer, within one deadline."""
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
        tally: Tally,
        tag: Tag = Tag.COLLECTIVE,
        confirmed: bool = False,
    ) -> Transfer:
        if x.device == HOST:
            return self._start_message(
                [bytes_of(x)], to=to, tag=tag, operation=operation, tally=tally, confirmed=confirmed
            )
        tally.sent_bytes += x.nbytes
        with self._on_device(operation, peer=to) as device_plane:
            device_plane.isend(x, to=to, operation=operation)
        return Transfer(self, None, x, peer=to, operation=operation, tally=tally)

    def _start_message(
        self,
        buffers: Sequence[memoryview],
        *,
        to: int,
        tag: Tag,
        operation: str,
        tally: Tally,
        confirmed: bool,
    ) -> Transfer:
        tally.sent_bytes += sum(buffer.nbytes for buffer in buffers)
        with self._on_host(operation, peer=to) as plane:
            pending = plane.isend(buffers, to=to, tag=tag, confirmed=confirmed)
        return Transfer(self, pending, buffers, peer=to, operation=operation, tally=tally)

    def _start_recv(
        self,
        x: Tensor,
        *,
        source: int,
        operation: str,
        tally: Tally,
        tag: Tag = Tag.COLLECTIVE,
        arrivals: int = 0,
    ) -> Transfer:
        pending: Pending | None = None
        if x.device != HOST:
            with self._on_device(operation, peer=source) as device_plane:
                device_plane.recv(x, source=source, operation=operation)
        else:
            with self._on_host(operation, peer=source) as plane:
                pending = plane.irecv(x, source=source, tag=tag)
        return Transfer(
            self,
            pending,
            x,
            peer=source,
            operation=operation,
            tally=tally,
            received_bytes=x.nbytes,
            arrivals=arrivals,
        )

    @contextmanager
    def _on_host(self, operation: str, *, peer: int) -> Iterator[LinkPlane]:
        try:
            yield self._links
        except OSError as error:
            raise self.peer_lost(error, peer=peer, operation=operation) from error

    @contextmanager
    def _on_device(self, operation: str, *, peer: int | None = None) -> Iterator[NcclPlane]:
        """Yields the NCCL plane; its errors name `peer`, or all other ranks where that is None."""
        assert self._nccl is not None, (
            f"{operation} of a tensor of a GPU in a group built for the host"
        )
        self.check()
        try:
            yield self._nccl
        except RuntimeError as error:
            self.check()  # an earlier timeout may be the cause
            if isinstance(error, OWN_FAILURES):
                raise own_failure(
                    error,
                    member=self.members[self._rank],
                    operation=f"{operation} (epoch {self.epoch})",
                ) from error
            raise PeerLost(
                peer=self._names_of_others() if peer is None else self.members[peer],
                operation=operation,
                reason=self._aborted or reason_of(error, timeout_s=self.timeout_s, waited_s=0.0),
                round_id=self._round_id,
                epoch=self.epoch,
            ) from error

    def _names_of_others(self) -> str:
        return " or ".join(self.members[peer] for peer in self._others) or self.members[self._rank]
