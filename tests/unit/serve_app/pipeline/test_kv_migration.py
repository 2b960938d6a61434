"""Streams leave one by one; whatever goes wrong on the way, both pipelines get their pages back."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import pytest

from eesd_dist.errors import EesdError, EngineError
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.types import RequestId
from serve_app.pipeline import kv_migration
from serve_app.pipeline.kv_migration import Contacts, How, KvMigration, MigrationReport, migrate
from tests.support.toy_group import until
from tests.support.toy_migration import PAGE, RANKS, Fault, ToyPipeline, World
from tests.unit.schedule.hash_stages import kv_layout

LAYOUT = kv_layout(verify_ranks=1)
TIMEOUT_S = 0.1


@pytest.fixture(autouse=True)
def _short_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_migration, "_MARGIN_S", 0.02)


def _ends(world: World | None = None, **how: Any) -> tuple[ToyPipeline, ToyPipeline]:
    world = world or World()
    return ToyPipeline("one", world), ToyPipeline("two", world, **how)


def _migrated(
    source: ToyPipeline, target: ToyPipeline, *, timeout_s: float = TIMEOUT_S, **how: Any
) -> MigrationReport:
    return asyncio.run(migrate(source.contacts, target.contacts, timeout_s=timeout_s, **how))


def _nothing_is_held(*pipelines: ToyPipeline) -> bool:
    for pipeline in pipelines:
        pipeline.pages.check()
    return not any(pipeline.held() for pipeline in pipelines)


def test_each_stream_is_told_to_leave_once_its_pages_are_there_the_longest_first() -> None:
    source, target = _ends()
    for name, num_pages in (("b", 3), ("c", 5), ("a", 3), ("short", 0)):
        source.begin(name, num_pages=num_pages, topic=ord(name[0]))
    streams = dict(source.streams)
    report = _migrated(source, target)
    assert [(r, to) for r, to in source.told] == [
        ("c", "two"),
        ("a", "two"),
        ("b", "two"),
        ("short", None),
    ]
    assert [(move.request_id, move.num_pages) for move in report.streams] == [
        ("c", 5),
        ("a", 3),
        ("b", 3),
        ("short", 0),
    ]
    assert (report.how, report.num_requests, report.num_pages, report.reason) == (
        "pages",
        4,
        11,
        "",
    )
    assert report.num_bytes == sum(move.num_bytes for move in report.streams) > 0
    assert [target.found(s.tokens) for s in streams.values()] == [3, 5, 3, 0]
    moments = source.world.moments
    evictions = [i for i, what in enumerate(moments) if what.startswith("evict")]
    copied = [i for i, what in enumerate(moments) if what.startswith("send_pages")]
    assert evictions[0] < copied[-1], "the first stream leaves before the last one is copied"
    assert _nothing_is_held(source, target)
    assert all(not actor.links for pipeline in (source, target) for actor in pipeline.actors)


def test_streams_whose_pages_are_there_already_come_last_and_send_none() -> None:
    source, target = _ends()
    source.begin("known", num_pages=6, topic=1)
    _migrated(source, target)
    source.begin("again", num_pages=6, topic=1)
    source.begin("new", num_pages=2, topic=2)
    report = _migrated(source, target)
    assert [(s.request_id, s.num_pages, s.num_present) for s in report.streams] == [
        ("new", 2, 0),
        ("again", 0, 6),
    ]
    assert source.told[1:] == [("new", "two"), ("again", "two")]


def test_a_long_stream_travels_in_parts_that_grow_while_they_are_fast() -> None:
    source, target = _ends(num_pages=64)
    source.pages = target.pages.__class__(num_pages=64, page_size=PAGE, prefix_caching=True)
    source.leases = type(target.leases)(source.pages)
    source.begin("long", num_pages=40)
    tokens = source.streams[RequestId("long")].tokens
    report = _migrated(source, target, timeout_s=5.0)
    assert (report.streams[0].num_pages, report.streams[0].num_present) == (40, 0)
    assert target.found(tokens) == 40
    calls = [w for w in source.world.moments if w.startswith("send_pages of drafting actor")]
    assert len(calls) == 3, "8, 16 and 16 pages"


def test_where_the_target_has_no_room_a_stream_takes_along_what_fits() -> None:
    source, target = _ends(num_pages=5)
    source.begin("a", num_pages=8)
    report = _migrated(source, target)
    assert (report.how, report.num_pages) == ("pages", 5)
    assert report.reason == "no room there for 3 pages"
    assert source.told == [("a", "two")]
    assert _nothing_is_held(source, target)


def test_when_the_time_is_up_streams_are_told_to_leave_without_their_pages() -> None:
    source, target = _ends()
    for name in ("a", "b"):
        source.begin(name, num_pages=2, topic=ord(name))
    tokens = source.streams[RequestId("a")].tokens

    async def slow(request: object) -> None:
        await asyncio.sleep(60)

    async def story() -> MigrationReport:
        moving = asyncio.ensure_future(
            migrate(source.contacts, target.contacts, timeout_s=20.0, budget_s=0.3)
        )
        async with asyncio.timeout(5.0):
            while ("a", "two") not in source.told:  # noqa: ASYNC110  # the actors are no tasks
                await asyncio.sleep(0)
            target.actors[1]._receive_pages = slow  # type: ignore[method-assign, assignment]
            return await moving

    report = asyncio.run(story())
    assert report.reason == "not everything was copied within 0.3 s"
    assert source.told == [("a", "two"), ("b", None)]
    assert target.found(tokens) == 2
    assert source.held() == []
    target.world.time_s = 1e6  # a rank of the target may have been writing
    target.sharing.expire()
    assert _nothing_is_held(source, target)


def _faults_of_one_run() -> list[str]:
    world = World()
    _run_three_streams(world)
    return world.moments


def _run_three_streams(
    world: World,
) -> tuple[ToyPipeline, ToyPipeline, MigrationReport | EesdError, dict[str, Any]]:
    source, target = _ends(world)
    for name, num_pages in (("a", 3), ("b", 2), ("c", 1)):
        source.begin(name, num_pages=num_pages, topic=ord(name))
    streams = {str(name): stream for name, stream in source.streams.items()}
    try:
        report: MigrationReport | EesdError = _migrated(source, target, timeout_s=0.03)
    except EesdError as error:
        report = error
    return source, target, report, streams


@pytest.mark.parametrize("fault", get_args(Fault))
def test_a_fault_at_any_moment_costs_no_stream_no_page_and_leaves_no_wrong_page(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_migration, "_FIRST_PAGES", 2)
    num_alive = 0
    moments = _faults_of_one_run()
    for at in range(len(moments)):
        world = World(fault=fault, fault_at=at)
        source, target, report, streams = _run_three_streams(world)
        assert world.faulted, at
        case = (fault, at, world.faulted)
        if isinstance(report, EesdError):
            assert "drafting actor" in str(report), case
            assert fault == "death" or world.faulted.endswith("evict of drafting actor of one"), (
                case
            )
        else:
            assert source.streams == {}, case
            assert sorted(r for r, _ in source.told) == ["a", "b", "c"], case
        assert target.wrong_writes == [], case
        for name, stream in streams.items():
            num_pages = target.found(stream.tokens)  # checks their content
            if (name, "two") in [(str(r), to) for r, to in source.told]:
                assert num_pages, case
                num_alive += 1
        for pipeline in (source, target):  # what could not be returned has expired by then
            world.time_s = 1e6
            pipeline.sharing.expire()
        assert _nothing_is_held(source, target), case
    assert num_alive > len(moments) / 2, "most streams keep pages that were there before the fault"


@pytest.mark.parametrize("method", ["lease_pages", "reserve_pages", "return_pages", "adopt_pages"])
def test_a_call_that_fails_for_one_stream_costs_only_that_stream(method: str) -> None:
    moments = _faults_of_one_run()
    connected = moments.index("open_link of verify rank 0 of two")
    first = next(i for i, w in enumerate(moments) if i > connected and w.startswith(method))
    source, target, report, _ = _run_three_streams(World(fault_at=first))
    assert isinstance(report, MigrationReport)
    assert source.told == [("a", None), ("b", "two"), ("c", "two")]
    assert report.reason.startswith("failed at")
    assert _nothing_is_held(source, target)


def test_when_a_link_dies_streams_that_were_copied_stay_and_the_others_leave_without_pages() -> (
    None
):
    moments = _faults_of_one_run()
    second = [i for i, w in enumerate(moments) if w == "a page reaches verify rank 0"][3]
    source, target, report, streams = _run_three_streams(World(fault="death", fault_at=second))
    assert isinstance(report, MigrationReport)
    assert source.told == [("a", "two"), ("b", None), ("c", None)]
    assert [target.found(stream.tokens) for stream in streams.values()] == [3, 0, 0]
    assert "verify rank 0" in report.reason


def test_room_is_left_to_its_lease_when_a_link_fails_behind_which_a_rank_may_write() -> None:
    moments = _faults_of_one_run()
    at = next(i for i, w in enumerate(moments) if w.startswith("answer to receive_pages"))
    source, target, report, _ = _run_three_streams(World(fault="cut link", fault_at=at))
    assert isinstance(report, MigrationReport)
    assert report.how == "recomputed"
    assert source.held() == []
    assert len(target.held()) == 3


def test_a_migration_that_is_cancelled_gives_back_what_it_leased() -> None:
    at = _faults_of_one_run().index("receive_pages of verify rank 0 of two")

    async def story() -> None:
        source, target = _ends(World(fault="freeze", fault_at=at))
        for name, num_pages in (("a", 3), ("b", 2), ("c", 1)):
            source.begin(name, num_pages=num_pages, topic=ord(name))
        moving = asyncio.ensure_future(migrate(source.contacts, target.contacts, timeout_s=5.0))
        await until(lambda: bool(source.world.faulted))
        assert source.held()
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert source.held() == []
        assert target.held(), "a rank may still be writing: its lease ends it"

    asyncio.run(asyncio.wait_for(story(), 10.0))


def test_pages_of_a_verify_rank_that_differs_are_not_taken() -> None:
    source, target = _ends()
    source.begin("a", num_pages=2)
    target.actors[1]._kv_layout = lambda: dataclasses.replace(  # type: ignore[method-assign]
        LAYOUT, machine="another"
    )
    report = _migrated(source, target)
    assert report.how == "recomputed"
    assert report.reason.endswith("verify rank 0: machine is m here and another there")
    assert source.told == [("a", None)]


@pytest.mark.parametrize("has_nccl", [True, False])
def test_pages_go_from_gpu_to_gpu_where_both_ends_have_nccl(has_nccl: bool) -> None:
    source, target = _ends()
    source.begin("a", num_pages=2)
    source.layout = dataclasses.replace(LAYOUT, gpu="GPU-1", has_nccl=True)
    target.layout = dataclasses.replace(LAYOUT, gpu="GPU-2", has_nccl=has_nccl)
    opened = []
    for actor in (*source.actors, *target.actors):
        actor._open_link = _spy(actor._open_link, opened)  # type: ignore[method-assign]
    assert _migrated(source, target).how == "pages"
    assert len(opened) == 2 * len(RANKS)
    assert {link.backend for link in opened} == {"nccl" if has_nccl else "link"}


def _spy(method: Callable[[Any], None], seen: list[Any]) -> Callable[[Any], None]:
    def called(argument: Any) -> None:
        seen.append(argument)
        method(argument)

    return called


class _NoMethods:
    """A handle of an actor without such a method, as of a verify rank."""


@pytest.mark.parametrize("how", ["pages", "recompute"])
def test_a_leader_that_is_no_drafting_actor_is_an_error_that_names_it(how: How) -> None:
    ends = [Contacts(pipeline=name, ranks={"verify rank 0": _NoMethods()}) for name in "ab"]
    with pytest.raises(EngineError, match="verify rank 0 cannot be asked for evict"):
        asyncio.run(migrate(*ends, how=how))


def _drained(source: ToyPipeline, other: PipelineReport, *, how: How = "pages") -> MigrationReport:
    async def mine() -> Contacts:
        return source.contacts

    migration = KvMigration(contacts=mine, how=how, timeout_s=TIMEOUT_S)
    return asyncio.run(migration(other, "it is being drained", None))


def _report(target: ToyPipeline | None = None) -> PipelineReport:
    ranks = {} if target is None else target.contacts.ranks
    return PipelineReport(pipeline_id=PipelineId("two"), leader="x", address=None, ranks=ranks)


def test_pages_go_to_the_ranks_that_the_other_pipeline_has_reported() -> None:
    source, target = _ends()
    source.begin("a", num_pages=2)
    assert _drained(source, _report(target)).how == "pages"
    assert target.held() == []
    first = source.evictions[0]
    assert (first.by, first.to) == ("one", "two"), "streams follow their pages"


@pytest.mark.parametrize("how", ["pages", "recompute"])
def test_without_pages_streams_go_to_any_pipeline_with_room(how: How) -> None:
    source, target = _ends(layout=dataclasses.replace(LAYOUT, machine="another"))
    source.begin("a", num_pages=2)
    report = _drained(source, _report(target), how=how)
    assert report.how == "recomputed"
    assert report.num_requests == 1
    assert source.told == [("a", None)]


def test_a_pipeline_without_a_leader_has_no_ranks_and_costs_only_the_copy() -> None:
    source, _ = _ends()
    source.begin("a", num_pages=2)
    report = _drained(source, _report())
    assert report.how == "recomputed"
    assert "its ranks are ['drafting actor', 'verify rank 0'] here and [] there" in report.reason
    assert source.told == [("a", None)]
