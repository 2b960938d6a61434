"""Whatever goes wrong while pages are copied, both pipelines get theirs back, and streams move."""

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from eesd_dist.errors import EngineError, Migrated
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.schedule.page_leases import (
    KvLayout,
    LeasedPages,
    PageLease,
    PageReservation,
    PageTraffic,
)
from eesd_dist.types import PageId, RequestId
from eesd_dist.workers.messages import Address, PageLink, Reservation
from serve_app.pipeline.kv_migration import Contacts, How, KvMigration, MigrationReport, migrate
from tests.unit.schedule.hash_stages import kv_layout

LAYOUT = kv_layout(verify_ranks=1)
TIMEOUT_S = 0.1


class Actor:
    """Both ends' drafting actor: which leases and reservations it has, and what it was asked
    for."""

    def __init__(self, *, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout
        self.leases: set[str] = set()
        self.reservations: set[str] = set()
        self.num_evictions = 0
        self.evicted_with: object = None
        self.broken: dict[str, Callable[[], None]] = {}
        self.frozen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)

    async def call(self, name: str, *args: Any) -> Any:
        answer = getattr(type(self), f"_{name}")(self, *args)
        if name in self.frozen:
            await asyncio.sleep(60)
        if name in self.broken:
            self.broken[name]()
        return answer

    def _kv_layout(self) -> KvLayout:
        return self.layout

    def _lease_pages(
        self, request_ids: Collection[RequestId] | None, timeout_s: float
    ) -> PageLease:
        del request_ids, timeout_s
        self.leases.add("l1")
        leased = LeasedPages(
            request_id=RequestId("a"), tokens=(), pages=(PageId(1), PageId(2)), drafts=True
        )
        return PageLease(number="l1", requests=(leased,))

    def _return_pages(self, number: str) -> bool:
        has = number in self.leases
        self.leases.discard(number)
        return has

    def _reserve_pages(self, lease: PageLease, timeout_s: float) -> Reservation:
        del lease, timeout_s
        self.reservations.add("n1")
        pages = PageReservation(
            number="n1", epoch=1, moves=((PageId(1), PageId(7)),), num_found=0, num_refused=0
        )
        return Reservation(pages=pages, store=Address(host="nowhere", port=1))

    def _adopt_pages(self, number: str) -> bool:
        self.reservations.discard(number)
        return True

    def _abandon_pages(self, number: str) -> None:
        self.reservations.discard(number)

    def _send_pages(self, link: PageLink) -> PageTraffic:
        return PageTraffic(num_pages=len(link.pages), num_bytes=8, seconds=0.0)

    _receive_pages = _send_pages

    def _evict(self, request_ids: object, error: object) -> int:
        del request_ids
        self.evicted_with = error
        self.num_evictions += 1
        return 1


class _Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *args: object) -> Any:
        return self._actor.call(self._name, *args)


def _contacts(name: str, *actors: Actor) -> Contacts:
    ranks = ("drafting actor", "verify rank 0")
    return Contacts(pipeline=name, ranks=dict(zip(ranks, actors, strict=False)))


def _migrated(source: Actor, target: Actor) -> MigrationReport:
    ends = _contacts("one", source), _contacts("two", target)
    return asyncio.run(migrate(*ends, timeout_s=TIMEOUT_S))


def test_pages_are_given_back_and_adopted() -> None:
    source, target = Actor(), Actor()
    assert _migrated(source, target).how == "pages"
    assert (source.leases, target.reservations, source.num_evictions) == (set(), set(), 1)


@pytest.mark.parametrize("at", ["reserve_pages", "send_pages", "return_pages"])
def test_a_call_that_fails_leaves_no_page_owned(at: str) -> None:
    def fail() -> None:
        raise EngineError("no")

    source, target = Actor(), Actor()
    source.broken[at] = target.broken[at] = fail
    assert _migrated(source, target).how == "recomputed"
    assert (source.leases, source.num_evictions) == (set(), 1)
    # A target that fails to answer has reserved pages that the source does not know of.
    assert target.reservations == ({"n1"} if at == "reserve_pages" else set())


def test_room_is_left_to_its_lease_when_a_link_fails_behind_which_a_rank_may_write() -> None:
    def cut() -> None:
        raise ActorUnavailableError("RpcError", None)

    source, target = Actor(), Actor()
    target.broken["receive_pages"] = cut
    assert _migrated(source, target).how == "recomputed"
    assert (source.leases, source.num_evictions) == (set(), 1)
    assert target.reservations == {"n1"}


def test_a_migration_that_is_cancelled_gives_back_what_it_leased() -> None:
    async def story() -> None:
        source, target = Actor(), Actor()
        target.frozen.add("receive_pages")
        ends = _contacts("one", source), _contacts("two", target)
        moving = asyncio.ensure_future(migrate(*ends, timeout_s=5.0))
        async with asyncio.timeout(5.0):
            while not target.reservations:  # noqa: ASYNC110  # the actors are no tasks
                await asyncio.sleep(0.01)
        assert source.leases == {"l1"}
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert source.leases == set()
        assert target.reservations == {"n1"}, "a rank may still be writing: its lease ends it"

    asyncio.run(story())


def test_pages_of_a_verify_rank_that_differs_are_not_taken() -> None:
    source, target = Actor(), Actor()
    like = Actor(layout=dataclasses.replace(LAYOUT, machine="another"))
    report = asyncio.run(
        migrate(
            _contacts("one", source, Actor()), _contacts("two", target, like), timeout_s=TIMEOUT_S
        )
    )
    assert report.how == "recomputed"
    assert report.reason.endswith("verify rank 0: machine is m here and another there")
    assert source.num_evictions == 1


class _NoMethods:
    """A handle of an actor without such a method, as of a verify rank."""


@pytest.mark.parametrize("how", ["pages", "recompute"])
def test_a_leader_that_is_no_drafting_actor_is_an_error_that_names_it(how: How) -> None:
    ends = [Contacts(pipeline=name, ranks={"verify rank 0": _NoMethods()}) for name in "ab"]
    with pytest.raises(EngineError, match="verify rank 0 cannot be asked for evict"):
        asyncio.run(migrate(*ends, how=how))


def _drained(source: Actor, other: PipelineReport, *, how: How = "pages") -> MigrationReport:
    async def mine() -> Contacts:
        return _contacts("one", source)

    migration = KvMigration(contacts=mine, how=how, timeout_s=TIMEOUT_S)
    return asyncio.run(migration(other, "it is being drained"))


def _report(*actors: Actor) -> PipelineReport:
    ranks = _contacts("two", *actors).ranks
    return PipelineReport(pipeline_id=PipelineId("two"), leader="x", address=None, ranks=ranks)


def test_pages_go_to_the_ranks_that_the_other_pipeline_has_reported() -> None:
    source, target = Actor(), Actor()
    assert _drained(source, _report(target)).how == "pages"
    assert target.reservations == set()
    evicted = source.evicted_with
    assert isinstance(evicted, Migrated)
    assert (evicted.by, evicted.to) == ("one", "two"), "streams follow their pages"


@pytest.mark.parametrize("how", ["pages", "recompute"])
def test_without_pages_streams_go_to_any_pipeline_with_room(how: How) -> None:
    source = Actor()
    fallback = Actor(layout=dataclasses.replace(LAYOUT, machine="another"))
    report = _drained(source, _report(fallback), how=how)
    assert report.how == "recomputed"
    assert report.num_requests == 1
    assert isinstance(source.evicted_with, Migrated)
    assert source.evicted_with.to is None


def test_a_pipeline_without_a_leader_has_no_ranks_and_costs_only_the_copy() -> None:
    source = Actor()
    report = _drained(source, _report())
    assert report.how == "recomputed"
    assert "its ranks are ['drafting actor'] here and [] there" in report.reason
    assert source.num_evictions == 1
