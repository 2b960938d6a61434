"""One actor's part in the KV migration of live requests to another pipeline.

The drafting actor makes leases and reservations. Every rank sends pages to its peer rank, or
receives them, over a group of two that lasts for one reservation. Everything runs in threads
separate from the round loop. Pages that fail to migrate are computed again by the target pipeline.

A late write must never happen: after a reservation is over its pages may belong to a request. So a
rank writes only while it belongs to the epoch in which the reservation was made, and only until its
own deadline. It leaves that epoch, under the same lock, before the drafting actor reallocates any
of the pages.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection

from torch import Tensor

from eesd_dist.engine.kv_sharing import KvSharing
from eesd_dist.engine.page_store import PageStore
from eesd_dist.errors import PeerLost
from eesd_dist.schedule.page_leases import KvLayout, PageLease, PageTraffic
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.key_store import StoreHost
from eesd_dist.transport.page_wire import Chunk, receive_pages, send_pages
from eesd_dist.transport.refused import RefusedConnections
from eesd_dist.transport.rendezvous import build_group, connect_store
from eesd_dist.types import RequestId
from eesd_dist.workers.messages import PageLink, Reservation

logger = logging.getLogger(__name__)


class PageSharing:
    """Implements `roles.PageSharing`: leases and reservations of the engine's pages, and the
    rendezvous stores of the reservations."""

    def __init__(
        self, *, address: str, kv_sharing: Callable[[], KvSharing], refused: RefusedConnections
    ) -> None:
        """`address` is this node's; `kv_sharing` raises EngineError while there is no engine."""
        self._address = address
        self._kv_sharing = kv_sharing
        self._refused = refused
        self._meetings: dict[str, StoreHost] = {}
        """The rendezvous store of each reservation."""

    def forget(self) -> None:
        """Closes all reservations; their epoch is over."""
        self._meetings.clear()

    def lease(self, request_ids: Collection[RequestId] | None) -> PageLease:
        return self._kv_sharing().lease(request_ids)

    def end_lease(self, number: str) -> bool:
        return self._kv_sharing().end_lease(number)

    def reserve(self, lease: PageLease) -> Reservation:
        # First, since there may be no free port.
        meeting = StoreHost(address=self._address, refused=self._refused)
        pages = self._kv_sharing().reserve(lease.requests)
        self._meetings[pages.number] = meeting
        return Reservation(pages=pages, store=meeting.at)

    def adopt(self, number: str) -> bool:
        self.close(number)
        return self._kv_sharing().adopt(number)

    def abandon(self, number: str) -> None:
        self.close(number)
        self._kv_sharing().abandon(number)

    def close(self, number: str) -> None:
        self._meetings.pop(number, None)


class PageMoves:
    """Implements `roles.PageTransfer` over one rank's page store."""

    def __init__(
        self,
        *,
        address: str,
        store: Callable[[], PageStore],
        layout: Callable[[], KvLayout],
        refused: RefusedConnections,
    ) -> None:
        """`store` and `layout` raise EngineError while there is none."""
        self._address = address
        self._store = store
        self._layout = layout
        self._refused = refused
        self._writing = threading.Lock()
        self._epoch = 0

    def enter(self, epoch: int) -> None:
        """Switches to this epoch: reservations of earlier ones are not written any more."""
        with self._writing:
            self._epoch = epoch

    def layout(self) -> KvLayout:
        return self._layout()

    def send(self, link: PageLink) -> PageTraffic:
        store = self._store()
        group = self._join(link, rank=0)
        try:
            return send_pages(
                group,
                lambda chunk: store.read(chunk, link.pages),
                page_bytes=store.page_bytes,
                num_pages=len(link.pages),
                number=link.number,
                timeout_s=link.timeout_s,
            )
        finally:
            group.abort("the pages were migrated")

    def receive(self, link: PageLink) -> PageTraffic:
        deadline = time.monotonic() + 2 * link.timeout_s  # one timeout_s is for joining
        store = self._store()

        def write(chunk: Chunk, content: Tensor) -> None:
            with self._writing:
                self._refuse_late_bytes(link, deadline)
                store.write(chunk, link.pages, content)

        group = self._join(link, rank=1)
        try:
            traffic = receive_pages(
                group,
                write,
                page_bytes=store.page_bytes,
                num_pages=len(link.pages),
                number=link.number,
                timeout_s=link.timeout_s,
            )
            store.settle()
        finally:
            group.abort("the pages were migrated")
        logger.info(
            "pages received: rank=%s pages=%d bytes=%d seconds=%.3f",
            link.rank_name, traffic.num_pages, traffic.num_bytes, traffic.seconds,
        )  # fmt: skip
        return traffic

    def _refuse_late_bytes(self, link: PageLink, deadline: float) -> None:
        reason = None
        if self._epoch != link.epoch:
            reason = f"it belongs to epoch {self._epoch} now"
        elif time.monotonic() > deadline:
            reason = f"not done within {2 * link.timeout_s:g} s"
        if reason is not None:
            raise PeerLost(
                peer=link.ends[1],
                operation="receiving pages",
                reason=reason,
                epoch=link.epoch,
            )

    def _join(self, link: PageLink, *, rank: int) -> ProcessGroup:
        store = connect_store(link.store, timeout_s=link.timeout_s)
        return build_group(
            store,
            epoch=link.epoch,
            name=f"pages of {link.rank_name}",
            rank=rank,
            size=2,
            timeout_s=link.timeout_s,
            address=self._address,
            members=link.ends,
            refused=self._refused,
        )
