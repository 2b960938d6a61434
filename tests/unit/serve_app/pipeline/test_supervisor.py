"""A supervisor with a group in this process, and what it does when the group cannot be repaired."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import PROCESS_DIED, EesdError, EngineError, Migrated, PeerLost, PoisonRequest
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request
from eesd_dist.workers.messages import Epoch
from eesd_dist.workers.roles import DraftLeader, RankWorker
from serve_app.config import service_config
from serve_app.pipeline import placement_groups
from serve_app.pipeline import supervisor as supervisor_module
from serve_app.pipeline.placement import RankSlot
from serve_app.pipeline.placement_groups import PlacementGroups
from serve_app.pipeline.supervisor import Supervisor, _may_be_a_request
from serve_app.pipeline.worker_group import WorkerGroup
from tests.support.toy_poison import POISON, WAYS, PoisonedStages
from tests.support.toy_stages import ToyLeader, ToyRank, ToyStages, ToyWorker, held
from tests.unit.serve_app.pipeline.test_fallback import _Here, _kills_here, _request

__all__ = ["_kills_here"]


class _Supervisor(Supervisor):
    """Real but for its worker group and its peer pipelines."""

    def __init__(self, group: WorkerGroup | Exception, folder: Path, **recovery: object) -> None:
        self.outcome = group
        self.there: Any = None
        config = service_config(
            {
                "engine": {
                    "model": {"path": str(folder)},
                    "parallel": {"verify_tensor_parallel_size": 2},
                },
                "recovery": recovery,
            }
        )
        super().__init__(
            config,
            ToyStages(),
            pipeline="p",
            router=None,
            find_peer_pipeline=self._peer_pipeline,
            publish_status=self._nothing,
        )

    async def _peer_pipeline(self) -> Any:
        return self.there

    async def _nothing(self) -> None:
        pass

    async def _make_group(self) -> WorkerGroup:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def stopped(self) -> None:
        self._supervising.cancel()
        await asyncio.gather(self._supervising, return_exceptions=True)


async def _tokens(supervisor: Supervisor, request: Request) -> int:
    return sum([len(e.tokens) async for part in supervisor.streams.stream(request) for e in part])


def _fails(slot: RankSlot) -> Any:
    raise EngineError(f"no device for {slot.name}")


def test_streams_migrate_when_another_pipeline_comes_up_while_forming_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_ASK_EVERY_S", 0.1)
    monkeypatch.setattr(supervisor_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_MAX_RETRY_S", 0.02)

    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=False)
        supervisor = _Supervisor(group, tmp_path)
        await supervisor.check()
        stream = asyncio.ensure_future(_tokens(supervisor, _request("moves", max_tokens=10_000)))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(group.workers, "_create_actor", _fails)
        group.handle("drafting actor").killed.set()
        await asyncio.sleep(1.0)
        assert not stream.done(), "failed formations are no reason to end it"
        supervisor.there = "another"
        with pytest.raises(Migrated, match="re-forming"):
            await asyncio.wait_for(stream, 3.0)
        await supervisor.stopped()
        await group.stop()

    asyncio.run(run())


def test_forming_is_given_up_after_its_deadline_and_streams_may_go_on_in_another_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_MAX_RETRY_S", 0.02)

    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=False)
        supervisor = _Supervisor(group, tmp_path, load_timeout_s=0.5)
        await supervisor.check()
        stream = asyncio.ensure_future(_tokens(supervisor, _request("lost", max_tokens=10_000)))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(group.workers, "_create_actor", _fails)
        group.handle("drafting actor").killed.set()
        with pytest.raises(PeerLost, match=r"not formed within 0\.5 s, the last time: .*no device"):
            await asyncio.wait_for(stream, 5.0)
        await asyncio.wait_for(supervisor._supervising, 5.0)
        with pytest.raises(EngineError, match="is given up"):
            await supervisor.check()

    asyncio.run(run())


@pytest.mark.parametrize("when", ["making", "forming"])
def test_a_bug_in_keeping_a_pipeline_leaves_no_caller_waiting(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=False)

        async def breaks(*, timeout_s: float) -> None:
            raise KeyError("unexpected")

        monkeypatch.setattr(group, "start_epoch", breaks)
        supervisor = _Supervisor(KeyError("unexpected") if when == "making" else group, tmp_path)
        with pytest.raises(EngineError, match="given up by a bug: KeyError"):
            await asyncio.wait_for(supervisor.check(), 5.0)
        if when == "making":
            with pytest.raises(EngineError, match="given up by a bug"):
                await asyncio.wait_for(supervisor.worker_group(), 5.0)
        with pytest.raises(PeerLost, match="given up by a bug"):
            await asyncio.wait_for(_tokens(supervisor, _request("ended", max_tokens=4)), 5.0)

    asyncio.run(run())


def test_places_are_looked_after_again_when_looking_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_groups, "_POLL_STATUS_S", 0.01)
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        raise ConnectionError("the head is away")

    async def run() -> None:
        groups = placement_groups.PlacementGroups([], name="p")
        monkeypatch.setattr(groups, "_poll", look)
        keeping = asyncio.ensure_future(groups.keep())
        await asyncio.sleep(0.2)
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(run())
    assert num_looks > 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PeerLost(peer="a", operation="o", reason=PROCESS_DIED), True),
        (EngineError("a bug"), True),
        (PeerLost(peer="a", operation="o", reason="its node has died"), False),
        (PeerLost(peer="a", operation="o", reason="no answer within 20 s"), False),
        (PeerLost(peer="a", operation="o", reason="its connection is gone"), False),
    ],
)
def test_deaths_and_bugs_may_be_a_requests_doing_and_lost_machines_not(
    error: EesdError, expected: bool
) -> None:
    assert _may_be_a_request(error) is expected


def test_an_engine_that_breaks_under_every_request_is_given_up_and_its_streams_are_lost(
    tmp_path: Path,
) -> None:
    async def run() -> list[object]:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=False)
        group.workers.spec = replace(group.workers.spec, stages=PoisonedStages())
        supervisor = _Supervisor(group, tmp_path, max_interruptions=1)
        await supervisor.check()
        bad = [
            replace(
                _request(f"bad-{i}", max_tokens=9),
                prompt=(POISON, WAYS["bug in the drafting actor"]),
            )
            for i in range(4)
        ]
        streams = [_tokens(supervisor, request) for request in bad]
        said: list[object] = await asyncio.wait_for(
            asyncio.gather(*streams, return_exceptions=True), 10.0
        )
        return said

    said = asyncio.run(run())
    assert sum(isinstance(error, PoisonRequest) for error in said) == 2
    lost = [error for error in said if isinstance(error, PeerLost)]
    assert len(lost) == 2
    assert all("is given up: it broke 4 times in a row without" in str(e) for e in lost)


def test_streams_that_a_drafting_actor_kept_go_on_with_the_fallback_that_leads_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verify rank is lost, and a draft rank while the epoch is formed."""

    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=2)
        supervisor = _Supervisor(group, tmp_path)
        await supervisor.check()
        form = group.start_epoch

        async def forms_once(*, timeout_s: float) -> None:
            monkeypatch.setattr(group, "start_epoch", form)
            slots = {slot.name: slot for slot in group.workers.slots}
            if group.workers.is_empty(slots["verify rank 1"]):
                await group.workers.fill(slots["verify rank 1"], "test")
            group.handle("draft rank 1").killed.set()
            while not group.workers.is_empty(slots["draft rank 1"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            monkeypatch.setattr(group.workers, "_spawn", _never)
            raise PeerLost(peer="draft rank 1", operation="test", reason=PROCESS_DIED)

        with held(group.engine):
            request = _request("kept", max_tokens=60)
            stream = asyncio.ensure_future(_tokens(supervisor, request))
            while (await group.drafter.handle.stats.remote()).num_running == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            monkeypatch.setattr(group, "start_epoch", forms_once)
            group.handle("verify rank 1").killed.set()
            while not supervisor.is_degraded:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await asyncio.wait_for(stream, 10.0) == 60
        assert supervisor.is_degraded
        await supervisor.stopped()
        await group.stop()

    asyncio.run(run())


async def _never(slot: RankSlot, operation: str) -> Any:
    await asyncio.Event().wait()


def test_a_submission_that_comes_to_a_leader_on_its_way_out_comes_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1)
        supervisor = _Supervisor(group, tmp_path)
        await supervisor.check()
        halt = group.halt
        late: list[asyncio.Task[list[object]]] = []

        async def submission() -> list[object]:
            request = _request("late", max_tokens=10_000)
            return [item async for item in supervisor.streams.probe(request)]

        async def halts() -> None:
            late.append(asyncio.ensure_future(submission()))
            await asyncio.sleep(0.1)
            await halt()

        monkeypatch.setattr(group, "halt", halts)
        group.handle("drafting actor").killed.set()
        async with asyncio.timeout(20.0):
            while not late:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert isinstance((await late[0])[-1], EesdError)
            while supervisor.is_degraded or not supervisor.is_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await supervisor.stopped()
        await group.stop()

    asyncio.run(run())


class _Broken(ToyWorker):
    """A process that can take part in no epoch."""

    def join(self, epoch: Epoch) -> ToyRank:
        raise OSError("too many open files")


class _FirstOneBroken(ToyStages):
    def __init__(self) -> None:
        self._made: list[RankWorker] = []

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        kind = ToyWorker if self._made else _Broken
        self._made.append(kind(config, rank=rank))
        return self._made[-1]


def test_a_process_that_fails_by_itself_is_replaced_and_its_healthy_peers_are_not(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=False)
        as_configured = group.workers.spec
        slots = {slot.name: slot for slot in group.workers.slots}
        group.workers.spec = replace(as_configured, stages=_FirstOneBroken())
        await group.workers.fill(slots["verify rank 1"], "test")
        await group.workers.fill(slots["verify rank 0"], "test")
        broken, healthy = group.handle("verify rank 1"), group.handle("verify rank 0")
        supervisor = _Supervisor(group, tmp_path)
        await asyncio.wait_for(supervisor.check(), 10.0)
        assert group.handle("verify rank 0") is healthy
        assert group.handle("verify rank 1") is not broken
        await supervisor.stopped()
        await group.stop()

    asyncio.run(run())


def test_gpus_that_join_while_room_is_waited_for_are_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter([0.0, 1.0, 1.0])
    asked: list[list[float]] = []
    removed: list[PlacementGroups] = []

    class Room(PlacementGroups):
        def remove(self) -> None:
            removed.append(self)

    async def placement_groups_for(
        slots: Sequence[RankSlot], *, placement: object, name: str
    ) -> PlacementGroups:
        asked.append([slot.resources.get("GPU", 0.0) for slot in slots])
        return Room([], name=name)

    monkeypatch.setattr(supervisor_module, "_gpus_per_rank", lambda engine: next(counted))
    monkeypatch.setattr(supervisor_module, "placement_groups_for", placement_groups_for)

    async def run() -> None:
        supervisor = _Supervisor(EngineError("no group in this test"), tmp_path)
        slots, groups = await supervisor._placed()
        assert asked == [[0.0] * 3, [1.0] * 3]
        assert [slot.resources["GPU"] for slot in slots] == [1.0] * 3
        assert len(removed) == 1
        assert removed[0] is not groups
        await supervisor.stopped()

    asyncio.run(run())


class _HasNoRoom(ToyLeader):
    def connect(self, epoch: Epoch) -> None:
        if epoch.is_degraded:
            raise OSError("cannot allocate memory")


class _NoRoomForFallback(ToyStages):
    def draft_leader(self, config: EngineConfig, tracing: Tracing) -> DraftLeader:
        return _HasNoRoom(config)


def test_a_fallback_that_fails_by_itself_does_not_cost_its_host(tmp_path: Path) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1)
        group.workers.spec = replace(group.workers.spec, stages=_NoRoomForFallback())
        supervisor = _Supervisor(group, tmp_path)
        await asyncio.wait_for(supervisor.check(), 10.0)
        host = group.handle("verify rank 0")
        group.handle("drafting actor").killed.set()
        async with asyncio.timeout(10.0):
            while supervisor.num_interruptions == 0 or not supervisor.is_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not supervisor.is_degraded
        assert group.handle("verify rank 0") is host
        await supervisor.stopped()
        await group.stop()

    asyncio.run(run())
