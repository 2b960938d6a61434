"""Part of one actor in the KV migration of live requests to another pipeline.

The drafting actor makes leases and reservations. Every rank sends pages to its peer rank, or
receives them, over a group of two that lasts for one KV migration. Everything runs in threads
separate from the round loop. Pages that fail to migrate are computed again by the target pipeline.

A late write must never happen: after a reservation is over its pages may belong to a request. So a
rank writes only while it belongs to the epoch in which the reservation was made, over a link that
it closes itself when no part begins for one deadline, and for no longer than one deadline. It
leaves that epoch, under the same lock, before the drafting actor reallocates any of the pages.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

import torch
from torch import Tensor

from eesd_dist.backends.api import engine_on
from eesd_dist.engine.kv_sharing import KvSharing
from eesd_dist.engine.page_store import PageStore
from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.schedule.page_leases import KvLayout, PageLease, PageReservation, PageTraffic
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.page_wire import Chunk, receive_pages, send_pages
from eesd_dist.transport.rendezvous import build_group, connect_store
from eesd_dist.transport.transfers import Tag
from eesd_dist.types import RequestId
from eesd_dist.workers.messages import Meeting, PageLink, PagePart

logger = logging.getLogger(__name__)


class PageSharing:
    """Implements `roles.PageSharing`: leases and reservations of the engine's pages, and the
    rendezvous stores of KV migrations, each until it ends or its time is up."""

    def __init__(
        self,
        *,
        address: str,
        kv_sharing: Callable[[], KvSharing],
        refusals: RefusedConnections,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address` is this node's; `kv_sharing` raises EngineError while there is no engine."""
        self._address = address
        self._kv_sharing = kv_sharing
        self._refusals = refusals
        self._clock = clock
        self._meetings: dict[str, StoreHost] = {}
        self._due: dict[str, tuple[float, Callable[[str], object]]] = {}
        """Time when each lease, reservation and meeting expires, and what ends it."""

    def forget(self) -> None:
        """Closes all stores; their epoch is over."""
        self._meetings.clear()

    def expire(self) -> None:
        """Raises EngineError while an engine is being built: nothing is held then."""
        time_s = self._clock()
        for number, (until_s, end) in list(self._due.items()):
            if time_s > until_s:
                logger.info("expired during a KV migration: number=%s", number)
                self._due.pop(number, None)
                end(number)

    def lease(self, request_ids: Collection[RequestId] | None, *, lasts_s: float) -> PageLease:
        lease = self._kv_sharing().lease(request_ids)
        self._hold(lease.number, self.end_lease, lasts_s=lasts_s)
        return lease

    def end_lease(self, number: str) -> bool:
        self._due.pop(number, None)
        return self._kv_sharing().end_lease(number)

    def meet(self, *, lasts_s: float) -> Meeting:
        number = uuid4().hex
        self._meetings[number] = host = StoreHost(address=self._address, refusals=self._refusals)
        self._hold(number, lambda number: self._meetings.pop(number, None), lasts_s=lasts_s)
        return Meeting(number=number, epoch=self._kv_sharing().epoch, store=host.at)

    def num_missing(self, lease: PageLease) -> Mapping[RequestId, int]:
        return self._kv_sharing().num_missing(lease.requests)

    def reserve(self, lease: PageLease, *, limit: int, lasts_s: float) -> PageReservation:
        pages = self._kv_sharing().reserve(lease.requests, limit=limit)
        self._hold(pages.number, self.abandon, lasts_s=lasts_s)
        return pages

    def adopt(self, number: str) -> bool:
        self._due.pop(number, None)
        return self._kv_sharing().adopt(number)

    def abandon(self, number: str) -> None:
        self._due.pop(number, None)
        self._kv_sharing().abandon(number)

    def _hold(self, number: str, end: Callable[[str], object], *, lasts_s: float) -> None:
        self._due[number] = (self._clock() + lasts_s, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenLink:
    group: ProcessGroup
    until_s: float
    """A part must begin before. A process that was stopped may get one late."""
    timer: threading.Timer
    """Closes the link then."""


class PageMoves:
    """Implements `roles.PageTransfer` over one rank's page store."""

    def __init__(
        self,
        *,
        address: str,
        store: Callable[[], PageStore],
        layout: Callable[[], KvLayout],
        refusals: RefusedConnections,
    ) -> None:
        """`store` and `layout` raise EngineError while there is none."""
        self._address = address
        self._store = store
        self._layout = layout
        self._refusals = refusals
        self._writing = threading.Lock()
        self._epoch = 0
        self._links: dict[str, _OpenLink] = {}
        self.num_moved = 0

    def enter(self, epoch: int) -> None:
        """Switches to this epoch: reservations of earlier ones are not written any more."""
        with self._writing:
            self._epoch = epoch

    def layout(self) -> KvLayout:
        return self._layout()

    def open(self, link: PageLink) -> None:
        page_device = self._store().device
        with engine_on(page_device).own_stream(page_device):
            group = build_group(
                connect_store(link.meeting.store, timeout_s=link.timeout_s),
                epoch=link.meeting.epoch,
                name=f"pages of {link.rank_name}",
                rank=link.end,
                size=2,
                timeout_s=link.timeout_s,
                device=page_device if link.backend == "nccl" else "cpu",
                address=self._address,
                members=link.ends,
                in_memory=False,
                refusals=self._refusals,
            )
            self._keep(link.meeting.number, group)
            with self._using(link.meeting.number):
                _greet(group)

    def send(self, share: PagePart) -> PageTraffic:
        store = self._store()

        def read(chunk: Chunk) -> Tensor:
            self.num_moved += 1
            return store.read(chunk, share.pages)

        with self._using(share.link) as group, engine_on(store.device).own_stream(store.device):
            return send_pages(
                group,
                read,
                page_bytes=store.page_bytes,
                num_pages=len(share.pages),
                number=share.number,
                timeout_s=share.timeout_s,
            )

    def receive(self, share: PagePart) -> PageTraffic:
        deadline = time.monotonic() + share.timeout_s
        store = self._store()

        def write(chunk: Chunk, content: Tensor) -> None:
            with self._writing:
                self._refuse_late_bytes(share, deadline, name=group.members[group.rank])
                store.write(chunk, share.pages, content)
                store.settle()
                self.num_moved += 1

        with self._using(share.link) as group, engine_on(store.device).own_stream(store.device):
            return receive_pages(
                group,
                write,
                page_bytes=store.page_bytes,
                num_pages=len(share.pages),
                number=share.number,
                timeout_s=share.timeout_s,
            )

    def close(self, link: str) -> None:
        if (opened := self._links.pop(link, None)) is not None:
            opened.timer.cancel()
            opened.group.abort("its KV migration is over")

    def _keep(self, link: str, group: ProcessGroup) -> None:
        timer = threading.Timer(group.timeout_s, self.close, (link,))
        timer.daemon = True
        until_s = time.monotonic() + group.timeout_s
        self._links[link] = _OpenLink(group=group, until_s=until_s, timer=timer)
        timer.start()

    @contextmanager
    def _using(self, link: str) -> Iterator[ProcessGroup]:
        """Yields the group of a link for one part. A link over which a part has failed is over."""
        opened = self._links.get(link)
        if opened is None or time.monotonic() > opened.until_s:
            raise EngineError("the link for these pages is closed")
        opened.timer.cancel()
        try:
            with opened.group.raises_lost_peers():
                yield opened.group
        except BaseException:
            self.close(link)
            raise
        if link in self._links:
            self._keep(link, opened.group)

    def _refuse_late_bytes(self, share: PagePart, deadline: float, *, name: str) -> None:
        reason = None
        if self._epoch != share.epoch:
            reason = f"it belongs to epoch {self._epoch} now"
        elif time.monotonic() > deadline:
            reason = f"not done within {share.timeout_s:g} s"
        if reason is not None:
            raise PeerLost(
                peer=name,
                operation="receiving pages",
                reason=reason,
                epoch=share.epoch,
            )


def _greet(group: ProcessGroup) -> None:
    """Makes the first transfer: NCCL connects a pair then, through a store that closes soon."""
    x = torch.zeros(1, device=group.device)
    if group.rank == 0:
        group.send(x, to=1, tag=Tag.PAGES, operation="greeting")
    else:
        group.recv(x, source=0, tag=Tag.PAGES, operation="greeting")
