"""A pipeline that is drained, by an operator or by Serve: its streams leave, and late ones too."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace

import pytest

from eesd_dist.errors import ConfigError, EngineError, PeerLost
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.types import RequestId
from serve_app.pipeline.drain import Draining
from serve_app.pipeline.kv_migration import MigrationReport, StreamMove
from serve_app.pipeline.relative_speed import SpeedOf
from tests.support.toy_group import until

OTHER = PipelineReport(pipeline_id=PipelineId("two"), leader="a", address=None)


class World:
    """Streams, the router, and another pipeline."""

    def __init__(self, *, other: PipelineReport | None = OTHER, num_live: int = 3) -> None:
        self.other = other
        self.num_live = num_live
        self.said: list[str] = []
        self.migrated: list[tuple[str, str, int]] = []
        """Target, reason and number of streams of each migration."""
        self.budgets_s: list[float | None] = []
        self.failures: list[Exception] = []
        """Of the next migrations."""
        self.draining = Draining(
            pipeline="one",
            num_live=self._num_live,
            find_peer_pipeline=self._find_peer_pipeline,
            publish_status=self._publish_status,
            migrate=self._migrate,
            period_s=0.01,
        )

    async def _num_live(self) -> int:
        return self.num_live

    async def _find_peer_pipeline(self) -> PipelineReport | None:
        return self.other

    async def _publish_status(self) -> None:
        self.said.append(self.draining.reason)

    async def _migrate(
        self, to: PipelineReport, reason: str, budget_s: float | None
    ) -> MigrationReport:
        self.budgets_s.append(budget_s)
        if self.failures:
            raise self.failures.pop(0)
        num_requests, self.num_live = self.num_live, 0
        self.migrated.append((to.pipeline_id, reason, num_requests))
        return MigrationReport(
            by="one",
            to=to.pipeline_id,
            num_requests=num_requests,
            streams=(StreamMove(request_id=RequestId("a"), num_pages=3),),
            seconds=0.0,
            reason="",
        )


def run(story: Callable[[World], Awaitable[None]], **how: object) -> None:
    async def told() -> None:
        async with asyncio.timeout(10.0):
            await story(World(**how))  # type: ignore[arg-type]

    asyncio.run(told())


def test_a_drained_pipeline_says_so_and_then_its_streams_leave() -> None:
    async def story(world: World) -> None:
        drained = await world.draining.drain()
        assert (drained.pipeline, drained.num_migrated) == ("one", 3)
        assert drained.migration is not None
        assert drained.migration.num_pages == 3
        assert world.said == ["drained by hand"]
        assert world.migrated == [("two", "drained by hand", 3)]
        assert world.budgets_s == [None], "it takes as long as it makes progress"

    run(story)


def test_a_request_that_still_comes_leaves_too_and_stays_once_it_is_undrained() -> None:
    async def story(world: World) -> None:
        await world.draining.drain()
        world.num_live = 1  # from an ingress that has not heard yet
        await until(lambda: len(world.migrated) == 2)
        await world.draining.undrain()
        assert world.said == ["drained by hand", ""]
        world.num_live = 1
        await asyncio.sleep(0.1)
        assert world.num_live == 1

    run(story)


def test_without_another_pipeline_nothing_is_drained() -> None:
    async def story(world: World) -> None:
        with pytest.raises(ConfigError, match="one goes on: no other pipeline takes requests"):
            await world.draining.drain()
        assert world.draining.reason == ""
        assert world.said == []
        assert world.num_live == 3

    run(story, other=None)


def test_a_pipeline_without_streams_is_drained_and_migrates_none() -> None:
    async def story(world: World) -> None:
        drained = await world.draining.drain()
        assert drained.num_migrated == 0
        assert drained.migration is None
        assert world.migrated == []

    run(story, num_live=0)


@pytest.mark.parametrize(
    "error",
    [EngineError("no way there"), PeerLost(peer="drafting actor", operation="evict", reason="r")],
)
def test_a_migration_that_fails_is_tried_again(error: Exception) -> None:
    async def story(world: World) -> None:
        world.failures = [error]
        drained = await world.draining.drain()
        assert drained.migration is None
        assert world.num_live == 3
        await until(lambda: world.num_live == 0)

    run(story)


def test_late_streams_leave_though_an_attempt_has_failed_with_a_bug() -> None:
    async def story(world: World) -> None:
        await world.draining.drain()
        world.failures = [AttributeError("kv_layout"), RuntimeError("no router")]
        world.num_live = 2
        await until(lambda: world.num_live == 0)

    run(story)


def test_a_pipeline_that_serve_takes_down_returns_when_no_stream_is_left() -> None:
    async def story(world: World) -> None:
        await world.draining.leave(timeout_s=5.0)
        assert world.migrated == [("two", "Serve takes it down", 3)]
        (budget_s,) = world.budgets_s
        assert budget_s is not None
        assert 2.0 < budget_s <= 3.0, "two seconds are left to tell the streams that are left"
        assert world.said == ["Serve takes it down"]
        with pytest.raises(ConfigError, match="one stays drained: Serve takes it down"):
            await world.draining.undrain()
        assert world.draining.reason == "Serve takes it down"

    run(story)


def test_where_there_is_no_other_pipeline_streams_are_served_to_their_ends() -> None:
    async def story(world: World) -> None:
        leaving = asyncio.ensure_future(world.draining.leave(timeout_s=5.0))
        await asyncio.sleep(0.05)
        assert not leaving.done()
        world.num_live = 0  # the last stream has ended by itself
        await leaving
        assert world.migrated == []

    run(story, other=None)


def test_streams_leave_as_soon_as_there_is_another_pipeline() -> None:
    async def story(world: World) -> None:
        leaving = asyncio.ensure_future(world.draining.leave(timeout_s=5.0))
        await asyncio.sleep(0.05)
        world.other = OTHER
        await leaving
        assert world.num_live == 0

    run(story, other=None)


def test_streams_that_cannot_leave_are_cut_off_in_the_end() -> None:
    async def story(world: World) -> None:
        began_s = asyncio.get_running_loop().time()
        await world.draining.leave(timeout_s=0.1)
        assert asyncio.get_running_loop().time() - began_s >= 0.1
        assert world.num_live == 3

    run(story, other=None)


def test_serve_may_take_down_what_was_drained_by_hand_and_no_stream_is_migrated_twice() -> None:
    async def story(world: World) -> None:
        world.failures = [EngineError("not yet")]
        await world.draining.drain()
        await world.draining.leave(timeout_s=5.0)
        assert world.draining.reason == "Serve takes it down"
        assert [num for _, _, num in world.migrated] == [3]

    run(story)


@pytest.mark.parametrize(
    ("cost", "speed"),
    [({"draft_step_s": 0.5, "verify_s": [0.03, 0.04], "round_s": 0.01}, 25.0), (None, None)],
)
def test_speed_is_plain_rounds_a_second(
    cost: Mapping[str, object] | None, speed: float | None
) -> None:
    async def ask(method: str) -> object:
        assert method == "control"
        return SimpleNamespace(cost=cost)

    measured = SpeedOf(ask)
    asyncio.run(measured.ask(1))
    assert measured.value == (None if speed is None else pytest.approx(speed))


def test_autoscaling_drains_a_pipeline_and_lets_it_take_requests_again() -> None:
    async def story(world: World) -> None:
        world.draining.follow(must_leave=True)
        assert world.draining.reason == "autoscaling wants fewer pipelines"
        async with asyncio.timeout(5.0):
            while not world.migrated:  # noqa: ASYNC110  # the world has no event for it
                await asyncio.sleep(0.01)
        world.draining.follow(must_leave=False)
        assert world.draining.reason == ""
        world.num_live = 2
        await asyncio.sleep(0.05)
        assert world.num_live == 2, "they stay"

    run(story)


def test_what_autoscaling_drains_cannot_be_undrained_by_hand() -> None:
    async def story(world: World) -> None:
        world.draining.follow(must_leave=True)
        with pytest.raises(ConfigError, match="stays drained: autoscaling wants fewer"):
            await world.draining.undrain()

    run(story)


def test_autoscaling_does_not_undo_what_an_operator_or_serve_has_drained() -> None:
    async def story(world: World) -> None:
        await world.draining.drain()
        world.draining.follow(must_leave=False)
        assert world.draining.reason == "drained by hand"
        await world.draining.leave(timeout_s=1.0)
        world.draining.follow(must_leave=False)
        assert world.draining.is_last

    run(story)
