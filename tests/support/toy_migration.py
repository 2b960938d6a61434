"""Two toy pipelines that migrate pages, and faults at any moment of a KV migration.

Leases and reservations are real, on both sides; ranks have the content of their pages, and exchange
it page by page. Each call, its answer and each page on the wire is a moment for a fault.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ray.exceptions import ActorDiedError, ActorUnavailableError

from eesd_dist.errors import EngineError, Migrated, PeerLost
from eesd_dist.schedule.page_leases import (
    KvLayout,
    LeasedPages,
    PageLease,
    PageLeases,
    PageReservation,
    PageTraffic,
)
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.types import PageId, RequestId, TokenId
from eesd_dist.workers.messages import Address, Meeting, PageLink, PagePart
from eesd_dist.workers.page_moves import PageSharing
from serve_app.pipeline.kv_migration import Contacts
from tests.unit.schedule.hash_stages import kv_layout

PAGE = 4
RANKS = ("drafting actor", "verify rank 0")

Fault = Literal["error", "cut link", "death", "freeze"]


@dataclass(slots=True)
class World:
    """Counts moments, and injects a fault at one of them."""

    fault: Fault = "error"
    fault_at: int = -1
    moments: list[str] = field(default_factory=list)
    faulted: str = ""
    wires: dict[tuple[str, str], "asyncio.Queue[object]"] = field(default_factory=dict)
    time_s: float = 0.0

    async def moment(self, actor: "ToyActor", what: str) -> None:
        self.moments.append(what)
        if len(self.moments) - 1 != self.fault_at:
            return
        self.faulted = what
        match self.fault:
            case "error":
                raise EngineError(f"failed at {what}")
            case "cut link":
                raise ActorUnavailableError("RpcError", None)
            case "death":
                actor.is_dead = True
                raise ActorDiedError
            case "freeze":
                await asyncio.sleep(60)


class ToyPipeline:
    """Streams with pages, and the leases and reservations of an allocator."""

    def __init__(
        self,
        name: str,
        world: World,
        *,
        num_pages: int = 32,
        layout: KvLayout | None = None,
        timeout_s: float = 0.05,
    ) -> None:
        self.name = name
        self.world = world
        self.timeout_s = timeout_s
        self.layout = layout or kv_layout(verify_ranks=1)
        self.pages = PageAllocator(num_pages=num_pages, page_size=PAGE, prefix_caching=True)
        self.leases = PageLeases(self.pages)
        self.epoch = 1
        self.streams: dict[RequestId, LeasedPages] = {}
        self.told: list[tuple[RequestId, str | None]] = []
        """Streams that were told to leave, and where to."""
        self.evictions: list[Migrated] = []
        self.wrong_writes: list[PageId] = []
        """Pages that were written while no reservation held them."""
        self.sharing = PageSharing(
            address="nowhere",
            kv_sharing=lambda: self,  # type: ignore[arg-type, return-value]
            refusals=RefusedConnections(),
            clock=lambda: world.time_s,
        )
        self.actors = [ToyActor(self, name=rank) for rank in RANKS]

    @property
    def contacts(self) -> Contacts:
        return Contacts(pipeline=self.name, ranks=dict(zip(RANKS, self.actors, strict=True)))

    def begin(self, name: str, *, num_pages: int, topic: int = 0) -> None:
        """Adds a stream with so many full pages; streams of one topic share their prefix."""
        tokens = tuple(TokenId(1000 * topic + i) for i in range(num_pages * PAGE))
        pages = self.pages.allocate(num_pages)
        assert pages is not None, "the toy has too few pages"
        request_id = RequestId(name)
        self.streams[request_id] = LeasedPages(
            request_id=request_id, tokens=tokens, pages=tuple(pages), drafts=True
        )
        for actor in self.actors:
            for index, page in enumerate(pages):
                actor.content[page] = _content(tokens, index, actor.name)

    def found(self, tokens: Sequence[TokenId]) -> int:
        """Returns how many pages of these tokens can be found; each has the right content."""
        pages = self.pages.match_prefix([*tokens, TokenId(0)], salt="s")
        self.pages.release(pages)
        for actor in self.actors:
            for index, page in enumerate(pages):
                assert actor.content[page] == _content(tokens, index, actor.name)
        return len(pages)

    def held(self) -> list[PageId]:
        return list(self.leases.owned())

    # As `KvSharing`.

    def lease(self, request_ids: Collection[RequestId] | None) -> PageLease:
        streams = [s for r, s in self.streams.items() if request_ids is None or r in request_ids]
        return self.leases.lease(streams)

    def end_lease(self, number: str) -> bool:
        return self.leases.end_lease(number)

    def num_missing(self, leased: Sequence[LeasedPages]) -> Mapping[RequestId, int]:
        return self.leases.num_missing(leased, salt_of=lambda _: "s")

    def reserve(self, leased: Sequence[LeasedPages], *, limit: int) -> PageReservation:
        return self.leases.reserve(
            leased,
            salt_of=lambda _: "s",
            num_reserved=0,
            untouchable=set(),
            epoch=self.epoch,
            limit=limit,
        )

    def adopt(self, number: str) -> bool:
        return self.leases.adopt(number)

    def abandon(self, number: str) -> None:
        self.leases.abandon(number)


def _content(tokens: Sequence[TokenId], index: int, rank: str) -> object:
    return (rank, tuple(tokens[: (index + 1) * PAGE]))


class ToyActor:
    """One rank; the first of a pipeline is its drafting actor."""

    def __init__(self, pipeline: ToyPipeline, *, name: str) -> None:
        self.name = name
        self.pipeline = pipeline
        self.content: dict[PageId, object] = {}
        self.links: list[PageLink] = []
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    async def call(self, name: str, *args: Any) -> Any:
        if self.is_dead:
            raise ActorDiedError
        world = self.pipeline.world
        step = f"{name} of {self.name} of {self.pipeline.name}"
        await world.moment(self, step)
        answer = getattr(self, f"_{name}")(*args)
        if asyncio.iscoroutine(answer):
            answer = await answer
        await world.moment(self, f"answer to {step}")
        return answer

    def _kv_layout(self) -> KvLayout:
        return self.pipeline.layout

    def _lease_pages(self, ids: Collection[RequestId] | None, timeout_s: float) -> PageLease:
        return self.pipeline.sharing.lease(ids, lasts_s=3 * timeout_s)

    def _return_pages(self, number: str) -> bool:
        return self.pipeline.sharing.end_lease(number)

    def _meet(self, timeout_s: float) -> Meeting:
        del timeout_s
        return Meeting(number="m", epoch=self.pipeline.epoch, store=Address(host="x", port=1))

    def _missing_pages(self, lease: PageLease) -> Mapping[RequestId, int]:
        return self.pipeline.sharing.num_missing(lease)

    def _reserve_pages(self, lease: PageLease, limit: int, timeout_s: float) -> PageReservation:
        return self.pipeline.sharing.reserve(lease, limit=limit, lasts_s=2 * timeout_s)

    def _adopt_pages(self, number: str) -> bool:
        return self.pipeline.sharing.adopt(number)

    def _abandon_pages(self, number: str) -> None:
        self.pipeline.sharing.abandon(number)

    def _evict(self, ids: Collection[RequestId] | None, error: Migrated) -> int:
        streams = self.pipeline.streams
        leaving = [r for r in streams if ids is None or r in ids]
        for request_id in leaving:
            self.pipeline.pages.release(streams.pop(request_id).pages)
            self.pipeline.told.append((request_id, error.to))
        self.pipeline.evictions.append(error)
        return len(leaving)

    def _open_link(self, link: PageLink) -> None:
        self.links.append(link)

    def _close_link(self, number: str) -> None:
        self.links = [link for link in self.links if link.meeting.number != number]

    async def _send_pages(self, share: PagePart) -> PageTraffic:
        wire = self._wire(share)
        for page in share.pages:
            await self.pipeline.world.moment(self, f"a page leaves {self.name}")
            wire.put_nowait(self.content[page])
        return PageTraffic(num_pages=len(share.pages), num_bytes=8, seconds=0.0)

    async def _receive_pages(self, share: PagePart) -> PageTraffic:
        wire = self._wire(share)
        for page in share.pages:
            try:
                content = await asyncio.wait_for(wire.get(), share.timeout_s)
            except TimeoutError as error:
                raise PeerLost(peer="its peer", operation="page", reason="late") from error
            await self.pipeline.world.moment(self, f"a page reaches {self.name}")
            if page not in self.pipeline.held():
                self.pipeline.wrong_writes.append(page)
            self.content[page] = content
        return PageTraffic(num_pages=len(share.pages), num_bytes=8, seconds=0.0)

    def _wire(self, share: PagePart) -> "asyncio.Queue[object]":
        assert any(link.meeting.number == share.link for link in self.links), "it is not connected"
        return self.pipeline.world.wires.setdefault((share.number, self.name), asyncio.Queue())


class _Method:
    def __init__(self, actor: ToyActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *args: object) -> Any:
        return self._actor.call(self._name, *args)
