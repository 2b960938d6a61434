"""A pipeline that is to go: how it learns of it, and that no stream is left waiting in it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress

import pytest

from eesd_dist.errors import ConfigError, EngineError, Migrated
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.types import RequestId
from serve_app.pipeline.drain import Draining
from serve_app.pipeline.kv_migration import Contacts, How, MigrationReport, migrate
from serve_app.pipeline.relative_speed import speed_of

R = RequestId("r")
OTHER = PipelineReport(pipeline_id=PipelineId("two"), address="replica-2")


class World:
    """Serve and the router, as far as a pipeline can tell."""

    def __init__(self, *, other: PipelineReport | None = OTHER) -> None:
        self.answers: str | None = "replica-1"
        self.other = other
        self.said: list[str] = []
        self.migrated: list[tuple[str, Collection[str]]] = []
        self.breaks_migration: Exception | None = None
        self.breaks_publishing: Exception | None = None
        self.num_pages = 0
        self.draining = Draining(
            pipeline="one",
            address="replica-1",
            answering_replica=self._answering_replica,
            find_peer_pipeline=self._find_peer_pipeline,
            publish_status=self._publish_status,
            migrate=self._migrate,
            period_s=0.001,
            doubt_s=0.0,
            keep_s=0.3,
        )

    async def _answering_replica(self) -> str | None:
        return self.answers

    async def _find_peer_pipeline(self) -> PipelineReport | None:
        return self.other

    async def _publish_status(self) -> None:
        if self.breaks_publishing is not None:
            raise self.breaks_publishing
        self.said.append(self.draining.reason)

    async def _migrate(
        self, to: PipelineReport, request_ids: Collection[RequestId]
    ) -> MigrationReport:
        if self.breaks_migration is not None:
            raise self.breaks_migration
        self.migrated.append((to.pipeline_id, request_ids))
        return MigrationReport(
            by="one",
            to=to.pipeline_id,
            num_requests=1,
            num_pages=self.num_pages,
            num_found=0,
            num_bytes=0,
            copy_s=0.0,
            seconds=0.0,
            how="pages" if self.num_pages else "recomputed",
        )


class Stream:
    """Parts as they are let out; knows whether it was closed."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[int] = asyncio.Queue()
        self.is_closed = False

    async def __call__(self) -> AsyncGenerator[int, None]:
        try:
            while (part := await self.parts.get()) >= 0:
                yield part
        finally:
            self.is_closed = True


def run(story: Callable[[World], Awaitable[None]], **how: PipelineReport | None) -> None:
    async def told() -> None:
        world = World(**how)
        watch = asyncio.ensure_future(world.draining.watch())
        await a_while()  # Serve counts on it
        try:
            async with asyncio.timeout(5.0):
                await story(world)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    asyncio.run(told())


async def a_while() -> None:
    await asyncio.sleep(0.05)


def test_a_stream_in_mid_wait_is_told_to_go_when_another_replica_answers() -> None:
    async def story(world: World) -> None:
        stream = Stream()
        watched = world.draining.watched(stream(), R)
        stream.parts.put_nowait(1)
        assert await anext(watched) == 1
        waiting = asyncio.ensure_future(anext(watched))
        await a_while()
        assert not waiting.done()
        world.answers = "replica-2"
        with pytest.raises(Migrated) as migrated:
            await waiting
        assert (migrated.value.by, migrated.value.to) == ("one", None)
        assert stream.is_closed
        assert world.said == ["Serve takes it down"]
        assert world.migrated[0] == ("two", [R])

    run(story)


def test_a_stream_between_two_parts_goes_before_the_next_one() -> None:
    async def story(world: World) -> None:
        stream = Stream()
        watched = world.draining.watched(stream(), R)
        stream.parts.put_nowait(1)
        assert await anext(watched) == 1
        stream.parts.put_nowait(2)
        assert (await world.draining.drain()).num_migrated == 1
        with pytest.raises(Migrated):
            await anext(watched)
        assert stream.is_closed

    run(story)


def test_a_request_that_still_comes_goes_at_once_and_stays_after_all_when_undrained() -> None:
    async def story(world: World) -> None:
        await world.draining.drain()
        with pytest.raises(Migrated, match="drained by hand"):
            await anext(world.draining.watched(Stream()(), R))
        await world.draining.undrain()
        stream = Stream()
        stream.parts.put_nowait(7)
        assert await anext(world.draining.watched(stream(), R)) == 7
        assert world.said == ["drained by hand", ""]

    run(story)


def test_where_there_is_no_other_pipeline_streams_are_served_to_their_ends() -> None:
    async def story(world: World) -> None:
        world.answers = "replica-2"
        await a_while()
        assert world.draining.reason
        stream = Stream()
        for part in (1, 2, -1):
            stream.parts.put_nowait(part)
        assert [part async for part in world.draining.watched(stream(), R)] == [1, 2]
        with pytest.raises(ConfigError, match="no other pipeline takes requests"):
            await world.draining.drain()

    run(story, other=None)


def test_streams_go_as_soon_as_there_is_another_pipeline() -> None:
    async def story(world: World) -> None:
        world.answers = "replica-2"
        waiting = asyncio.ensure_future(anext(world.draining.watched(Stream()(), R)))
        await a_while()
        assert not waiting.done()
        world.other = OTHER
        with pytest.raises(Migrated):
            await waiting

    run(story, other=None)


def test_silence_proves_nothing_and_an_answer_of_ones_own_takes_it_back() -> None:
    async def story(world: World) -> None:
        for answers, reason in (
            (None, ""),
            ("replica-2", "Serve takes it down"),
            (None, "Serve takes it down"),
            ("replica-1", ""),
        ):
            world.answers = answers
            await a_while()
            assert world.draining.reason == reason

    run(story)


def test_a_replica_that_serve_does_not_count_on_yet_is_not_going() -> None:
    async def told() -> None:
        world = World()
        world.answers = "replica-2"
        watch = asyncio.ensure_future(world.draining.watch())
        await a_while()
        assert world.draining.reason == ""
        world.answers = "replica-1"
        await a_while()
        world.answers = "replica-2"
        await a_while()
        assert world.said == ["Serve takes it down"]
        watch.cancel()

    asyncio.run(told())


def test_a_single_wrong_answer_is_doubted() -> None:
    async def story(world: World) -> None:
        answers = iter(["replica-2", *["replica-1"] * 10**6])
        world.draining._answering_replica = lambda: _answered(next(answers))
        await a_while()
        assert world.said == []

    run(story)


async def _answered(name: str) -> str:
    return name


@pytest.mark.parametrize(("num_pages", "to"), [(0, None), (3, "two")])
def test_a_stream_is_sent_after_its_pages_and_otherwise_to_any_pipeline_with_room(
    num_pages: int, to: str | None
) -> None:
    async def story(world: World) -> None:
        world.num_pages = num_pages
        waiting = asyncio.ensure_future(anext(world.draining.watched(Stream()(), R)))
        await asyncio.sleep(0)
        drained = await world.draining.drain()
        assert drained.migration is not None
        assert drained.migration.num_pages == num_pages
        with pytest.raises(Migrated) as migrated:
            await waiting
        assert migrated.value.to == to

    run(story)


@pytest.mark.parametrize("error", [EngineError("no way there"), AttributeError("kv_layout")])
def test_a_migration_that_fails_costs_no_stream_its_way_out(error: Exception) -> None:
    async def story(world: World) -> None:
        world.breaks_migration = error
        waiting = asyncio.ensure_future(anext(world.draining.watched(Stream()(), R)))
        await asyncio.sleep(0)
        await world.draining.drain()
        with pytest.raises(Migrated):
            await waiting

    run(story)


def test_the_watch_survives_what_it_cannot_say_and_still_lets_streams_go() -> None:
    async def story(world: World) -> None:
        waiting = asyncio.ensure_future(anext(world.draining.watched(Stream()(), R)))
        world.breaks_publishing = RuntimeError("no router")
        world.answers = "replica-2"
        with pytest.raises(Migrated):
            await waiting

    run(story)


class _NoMethods:
    """A handle of an actor that takes no such call, as a verify rank in the drafter's place."""


@pytest.mark.parametrize("how", ["pages", "recompute"])
def test_a_drafting_actor_that_is_none_is_an_error_of_ours(how: How) -> None:
    ends = [Contacts(pipeline=name, ranks={"verify rank 0": _NoMethods()}) for name in "ab"]
    with pytest.raises(EngineError, match="verify rank 0 cannot be asked for evict"):
        asyncio.run(migrate(*ends, how=how))


def test_a_timeout_of_the_streams_own_is_not_taken_for_an_order_to_go() -> None:
    async def late() -> AsyncGenerator[int, None]:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(5)
        yield 1

    async def story(world: World) -> None:
        with pytest.raises(TimeoutError):
            await anext(world.draining.watched(late(), R))

    run(story)


def test_speed_is_plain_rounds_a_second() -> None:
    cost = {"draft_step_s": 0.5, "verify_s": [0.03, 0.04], "round_s": 0.01}
    assert speed_of(cost) == pytest.approx(25.0)
    assert speed_of(None) is None


def test_a_stream_that_no_other_pipeline_took_is_kept_for_a_while() -> None:
    async def story(world: World) -> None:
        await world.draining.drain()  # the other one is known, and dead
        kept = world.draining.watched(Stream()(), R, must_take=True)
        waiting = asyncio.ensure_future(anext(kept))
        await a_while()
        assert not waiting.done()
        assert world.migrated == [], "nothing of it moves without its stream"
        since_s = asyncio.get_running_loop().time()
        with pytest.raises(Migrated):
            await waiting
        assert asyncio.get_running_loop().time() - since_s > 0.1

    run(story)
