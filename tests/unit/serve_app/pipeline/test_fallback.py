"""A group of actors in this process: its draft stage is lost, replaced by fallbacks, and back."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eesd_dist.config import ParallelConfig
from eesd_dist.errors import EngineError, Migrated, PeerLost
from eesd_dist.types import Emission
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.worker import FallbackHandle, Worker
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import Workers
from tests.support.toy_group import (
    ToyCluster,
    ToyWorkers,
    answer,
    emissions_of,
    expected,
    handle_of,
    is_filled,
    lose,
    toy_request,
    until,
)

SHORT = {"deadline_s": 0.3, "busy_s": 0.3, "ping_s": 0.1}


@pytest.mark.parametrize("num_draft_ranks", [1, 2])
def test_fallbacks_take_the_part_of_a_draft_stage_that_died_until_it_is_ready(
    num_draft_ranks: int, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, num_draft_ranks=num_draft_ranks))
        assert not group.can_fall_back
        await group.start_epoch(timeout_s=10.0)
        assert not group.can_fall_back
        victim = "drafting actor" if num_draft_ranks == 1 else "draft rank 1"
        await lose(group, victim)

        assert group.can_fall_back
        await group.start_degraded_epoch(timeout_s=10.0)
        assert group.is_degraded
        assert group.leader.slot.name == "fallback in verify rank 0"
        request = toy_request("plain", max_tokens=7)
        assert await answer(group.leader, request) == expected(request)

        assert not group.is_draft_ready
        await group.restore_draft(timeout_s=10.0)
        assert group.is_draft_ready
        assert handle_of(group, victim).asked.count("prepare") == 1
        assert "join" not in handle_of(group, victim).asked
        assert not group.can_fall_back
        assert group.is_degraded, "until the next epoch is started"
        await group.end_epoch(EngineError("failing back"))
        assert group.kind is EpochKind.NONE
        await group.start_epoch(timeout_s=10.0)
        assert group.kind is EpochKind.FULL
        assert group.leader.slot.name == "drafting actor"
        assert group.epoch == 3
        request = toy_request("full", max_tokens=7)
        assert await answer(group.leader, request) == expected(request)
        await group.stop()

    asyncio.run(run())


def test_a_verify_rank_that_dies_then_takes_its_fallback_along(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        trouble = asyncio.ensure_future(group.trouble())
        await asyncio.sleep(0)
        handle_of(group, "verify rank 0").killed.set()
        error = await trouble
        with pytest.raises(PeerLost, match="verify rank 0"):
            _ = group.leader
        await group.end_epoch(error)
        assert not group.can_fall_back, "a verify rank without weights has no head start"
        await group.start_epoch(timeout_s=10.0)
        assert [worker.slot.name for worker in group.workers] == [
            "drafting actor",
            "verify rank 0",
            "verify rank 1",
        ]
        assert not group.is_degraded
        await group.stop()

    asyncio.run(run())


def test_a_death_that_follows_a_complaint_is_named_as_soon_as_it_is_known(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, grace_s=15.0))
        await group.start_epoch(timeout_s=10.0)
        trouble = asyncio.ensure_future(group.trouble())
        await asyncio.sleep(0.01)
        await handle_of(group, "drafting actor").actor.leave()  # its loop ends first
        await asyncio.sleep(0.01)
        handle_of(group, "verify rank 1").killed.set()
        message = str(await asyncio.wait_for(trouble, 5.0))
        assert "verify rank 1" in message
        assert "its process has died" in message
        await group.stop()

    asyncio.run(run())


def test_a_worker_that_freezes_while_a_degraded_epoch_starts_is_named_and_replaced(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, **SHORT))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        frozen = handle_of(group, "verify rank 1")
        frozen.thawed.clear()
        assert group.can_fall_back
        with pytest.raises(PeerLost, match=r"verify rank 1.*no answer within 0\.3 s") as lost:
            await asyncio.wait_for(group.start_degraded_epoch(timeout_s=60.0), 10.0)
        await group.end_epoch(lost.value)
        assert frozen.killed.is_set()
        await group.start_epoch(timeout_s=10.0)
        assert is_filled(group)
        await group.stop()

    asyncio.run(run())


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_new_worker_that_never_has_its_weights_is_killed_for_another(
    is_frozen: bool, tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that freezes is replaced within the same attempt."""

    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, **SHORT))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        spawn = group.workers._create_actor

        def bad_at_first(slot: RankSlot) -> Any:
            monkeypatch.setattr(group.workers, "_create_actor", spawn)
            handle = spawn(slot)
            handle.actor.prepare = lambda *_: asyncio.Event().wait()
            if is_frozen:
                asyncio.get_running_loop().call_later(0.05, handle.thawed.clear)
            return handle

        for coming in group.workers._coming.values():  # else one is on its way already
            coming.cancel()
        group.workers._coming.clear()
        monkeypatch.setattr(group.workers, "_create_actor", bad_at_first)
        if not is_frozen:
            why = r"there after 0\.5 s \(missing: drafting actor\)"
            with pytest.raises(PeerLost, match=why):
                await group.restore_draft(timeout_s=0.5)
            assert not group.is_draft_ready
            assert group.is_degraded
        await group.restore_draft(timeout_s=5.0)
        assert group.is_draft_ready
        await group.stop()

    asyncio.run(run())


def test_a_draft_rank_that_freezes_while_the_drafting_actor_is_replaced_is_replaced_too(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, num_draft_ranks=2, **SHORT))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        frozen = handle_of(group, "draft rank 1")
        frozen.thawed.clear()
        await until(lambda: any(m.failure.done() for m in group.workers))
        await group.restore_draft(timeout_s=5.0)
        assert frozen.killed.is_set()
        assert group.is_draft_ready
        await group.stop()

    asyncio.run(run())


def test_without_fallbacks_a_dead_drafting_actor_is_waited_for(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        assert not group.can_fall_back
        handle = handle_of(group, "verify rank 0")
        assert "fallback" not in handle.asked
        with pytest.raises(EngineError, match=r"no fallback: set engine\.parallel\.fallback"):
            await handle.actor.fallback("stats")
        await group.stop()

    asyncio.run(run())


def test_a_new_worker_that_is_still_coming_when_the_degraded_epoch_breaks_is_not_lost(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path))
        await group.start_epoch(timeout_s=10.0)
        may_come, num_spawned = asyncio.Event(), 0

        async def comes(slot: RankSlot, operation: str) -> Worker:
            nonlocal num_spawned
            num_spawned += 1
            await may_come.wait()
            return await Workers._spawn(group.workers, slot, operation)

        monkeypatch.setattr(group.workers, "_spawn", comes)
        await lose(group, "drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        restoring = asyncio.ensure_future(group.restore_draft(timeout_s=10.0))
        await asyncio.sleep(0.01)
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)
        await group.end_epoch(EngineError("broken"))
        may_come.set()
        await group.start_epoch(timeout_s=10.0)
        assert num_spawned == 1
        assert not group.is_degraded
        await group.stop()

    asyncio.run(run())


def test_a_restore_that_takes_too_long_goes_on_from_where_it_was(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path))
        await group.start_epoch(timeout_s=10.0)
        may_come, num_spawned = asyncio.Event(), 0

        async def comes(slot: RankSlot, operation: str) -> Worker:
            nonlocal num_spawned
            num_spawned += 1
            await may_come.wait()
            return await Workers._spawn(group.workers, slot, operation)

        monkeypatch.setattr(group.workers, "_spawn", comes)
        await lose(group, "drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        with pytest.raises(PeerLost, match=r"after 0\.05 s \(missing: drafting actor\)"):
            await group.restore_draft(timeout_s=0.05)
        may_come.set()
        await group.restore_draft(timeout_s=10.0)
        assert group.is_draft_ready
        assert num_spawned == 1
        await group.stop()

    asyncio.run(run())


def test_streams_that_are_sent_on_end_with_the_reason_after_the_tokens_they_have(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        request = toy_request("moving", max_tokens=10_000)
        read: list[Emission] = []

        async def reading() -> None:
            async for emission in emissions_of(group.leader, request):
                read.append(emission)

        stream = asyncio.ensure_future(reading())
        await until(lambda: read)
        reason = Migrated(by="", to=None, reason="failing back")
        await group.send_streams_on(reason)
        leader = group.leader
        assert (await leader.ask("ended", "test")).error is None, "its loop has ended in good order"
        await group.end_epoch(reason)
        with pytest.raises(Migrated, match="failing back"):
            await asyncio.wait_for(stream, 5.0)
        tokens = [token for emission in read for token in emission.tokens]
        assert tokens == expected(request)[: len(tokens)]
        assert handle_of(group, "verify rank 0") is leader.handle.host, "no worker was killed"
        await group.stop()

    asyncio.run(run())


def test_a_handle_calls_the_fallback_through_its_host_wherever_it_is_sent() -> None:
    handle = pickle.loads(pickle.dumps(FallbackHandle(_Echo("host"))))
    assert handle.stats.remote() == ("host", "fallback", ("stats",))
    assert handle.evict.remote(None, 7) == ("host", "fallback", ("evict", None, 7))


class _Echo:
    """Returns the call."""

    def __init__(self, name: str, method: str = "") -> None:
        self.name = name
        self.method = method

    @property
    def fallback(self) -> "_Echo":
        return _Echo(self.name, "fallback")

    def remote(self, *arguments: object) -> object:
        return self.name, self.method, arguments


def test_a_fallback_wants_a_verify_rank_for_each_draft_rank() -> None:
    with pytest.raises(ValidationError, match="raise verify_tensor_parallel_size to 2"):
        ParallelConfig(fallback=True, draft_tensor_parallel_size=2)
    assert ParallelConfig(fallback=True).fallback
    assert not ParallelConfig().fallback
