"""Workers of a dead supervisor: claimed with their epoch, by one supervisor, or ended."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.errors import LeaseLost, PeerLost
from eesd_dist.workers.messages import Lease
from eesd_dist.workers.tenure import LAST_WAIT_S
from serve_app.config import ServiceConfig, SparesConfig, service_config
from serve_app.pipeline import claim as claim_module
from serve_app.pipeline import held_room
from serve_app.pipeline.claim import Orphans, claim, digest_of, orphans_of
from serve_app.pipeline.held_room import held_rooms, waiting_for_room
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.worker_group import WorkerGroup
from tests.support.toy_group import (
    APP,
    NAMESPACE,
    ToyCluster,
    ToyWorkers,
    answer,
    emissions_of,
    expected,
    handle_of,
    lose,
    supervised,
    toy_request,
    until,
)


def _config(folder: Path, **changes: Any) -> ServiceConfig:
    return service_config(
        {
            "app_name": APP,
            "engine": {"model": {"path": str(folder)}, **changes},
            "router": {"namespace": NAMESPACE},
        }
    )


def _lease(owner: str) -> Lease:
    return Lease(owner=owner, seconds=25.0)


class World:
    """A service and its supervisors, which die."""

    def __init__(self, cluster: ToyCluster, folder: Path) -> None:
        self.cluster = cluster
        self.config = _config(folder)
        self._folder = folder

    def workers(self, owner: str, **options: Any) -> ToyWorkers:
        digest = options.pop("digest", digest_of(self.config))
        return ToyWorkers(self.cluster, self._folder, owner=owner, digest=digest, **options)

    async def started(self, owner: str, **options: Any) -> WorkerGroup:
        group = WorkerGroup(self.workers(owner, **options))
        await group.start_epoch(timeout_s=10.0)
        self.cluster.groups |= {"app/p/verify/1", "app/p/draft/1", "app/other/verify/1"}
        return group

    async def dies(self, group: WorkerGroup) -> None:
        """Its supervisor does, and leaves its workers alone."""
        for worker in group.workers:
            worker.stop_beating()
        for fallback in group._fallbacks:
            fallback.stop_beating()
        self.cluster.dead.add(group.workers.spec.owner)
        await asyncio.sleep(0.05)

    async def orphans(self, owner: str) -> Orphans | None:
        return await orphans_of(self.config, _lease(owner))

    async def claimed(self, owner: str, **options: Any) -> WorkerGroup:
        orphans = await self.orphans(owner)
        assert orphans is not None
        assert orphans.pipeline == "p"
        return await claim(orphans, self.workers(owner, **options))


@pytest.fixture
def world(cluster: ToyCluster, tmp_path: Path) -> World:
    return World(cluster, tmp_path)


def _run(story: Callable[[], Awaitable[None]]) -> None:
    async def told() -> None:
        async with asyncio.timeout(30.0):
            await story()

    asyncio.run(told())


def test_a_stream_does_not_notice_that_the_supervisor_of_its_workers_was_replaced(
    world: World,
) -> None:
    async def story() -> None:
        first = await world.started("one")
        first.workers.start_s = 12.0
        handles = [worker.handle for worker in first.workers]
        request = toy_request("r", max_tokens=60)
        stream = asyncio.ensure_future(answer(first.leader, request))
        await until(lambda: first.leader.status.num_live)
        await until(lambda: first.leader.handle.actor._tenure._start_s == 12.0)
        await world.dies(first)

        group = await world.claimed("two")
        assert (group.kind, group.epoch) == (EpochKind.FULL, 1)
        assert group.claimed_trouble is None
        assert group.workers.start_s == 12.0
        assert [worker.handle for worker in group.workers] == handles
        assert first.kv_capacity is not None
        assert group.kv_capacity is not None
        assert group.kv_capacity.num_pages == first.kv_capacity.num_pages == 100
        supervisor = supervised(group)
        await supervisor.check()
        assert supervisor.is_ready
        assert await stream == expected(request)
        assert supervisor.interruptions.number == 0
        assert group.epoch == 1
        await supervisor.stop()

    _run(story)


def test_claimed_workers_recover_as_if_their_supervisor_had_started_them(world: World) -> None:
    async def story() -> None:
        first = await world.started("one")
        await world.dies(first)
        group = await world.claimed("two")
        supervisor = supervised(group)
        await supervisor.check()
        handle_of(group, "verify rank 1").killed.set()
        await until(lambda: supervisor.interruptions.number and supervisor.is_ready)
        assert group.epoch == 2
        request = toy_request("after", max_tokens=9)
        assert await answer(group.leader, request) == expected(request)
        await supervisor.stop()

    _run(story)


def test_workers_of_a_supervisor_that_lives_are_left_alone(world: World) -> None:
    async def story() -> None:
        first = await world.started("one")
        assert await world.orphans("two") is None
        trouble = asyncio.ensure_future(first.trouble())
        await asyncio.sleep(0.1)
        assert not trouble.done()
        await first.stop()

    _run(story)


def test_workers_that_have_not_heard_from_their_supervisor_yet_are_its_own(world: World) -> None:
    async def story() -> None:
        workers = world.workers("one")
        workers._create_actor(workers.slots[0])
        assert await world.orphans("two") is None

    _run(story)


def test_workers_with_another_configuration_are_ended_with_their_placement_groups(
    world: World,
) -> None:
    async def story() -> None:
        await world.dies(await world.started("one", digest="of yesterday"))
        assert await world.orphans("two") is None
        assert not world.cluster.actors
        assert world.cluster.groups == {"app/other/verify/1"}

    _run(story)


def test_workers_of_another_service_are_nothing_to_this_one(world: World) -> None:
    async def story() -> None:
        await world.dies(await world.started("one"))
        other = world.config.model_copy(update={"app_name": "other"})
        assert await orphans_of(other, _lease("two")) is None
        assert len(world.cluster.actors) == 3

    _run(story)


def test_of_two_claimants_one_gets_all_workers_and_the_other_none(world: World) -> None:
    async def story() -> None:
        await world.dies(await world.started("one"))
        claims = await asyncio.gather(world.orphans("two"), world.orphans("three"))
        winners = [
            owner for owner, f in zip(("two", "three"), claims, strict=True) if f is not None
        ]
        assert len(winners) == 1
        (orphans,) = [f for f in claims if f is not None]
        group = await claim(orphans, world.workers(*winners))
        assert group.kind is EpochKind.FULL
        assert len(world.cluster.actors) == 3
        await group.stop()

    _run(story)


def test_a_claimant_that_finds_a_rival_at_one_worker_leaves_that_worker_alive(
    world: World,
) -> None:
    async def story() -> None:
        first = await world.started("one")
        rivals = handle_of(first, "verify rank 1")
        await world.dies(first)
        orphans = await world.orphans("two")
        assert orphans is not None
        await rivals.actor.claim(_lease("three"), "one")
        with pytest.raises(LeaseLost, match="claimed by three"):
            await claim(orphans, world.workers("two"))
        assert not rivals.killed.is_set()

    _run(story)


def test_an_epoch_that_lacks_a_worker_is_ended_and_started_again_with_the_others(
    world: World,
) -> None:
    async def story() -> None:
        first = await world.started("one")
        survivor = handle_of(first, "verify rank 0")
        request = toy_request("r", max_tokens=10_000)
        stream = asyncio.ensure_future(answer(first.leader, request))
        await until(lambda: first.leader.status.num_live)
        await world.dies(first)
        world.cluster.kill(handle_of(first, "verify rank 1"))

        group = await world.claimed("two")
        assert group.kind is EpochKind.FULL
        assert isinstance(group.claimed_trouble, PeerLost)
        assert "verify rank 1" in str(group.claimed_trouble)
        supervisor = supervised(group)
        await until(lambda: group.epoch == 2 and supervisor.is_ready)
        assert supervisor.interruptions.number == 1
        assert handle_of(group, "verify rank 0") is survivor
        with pytest.raises(PeerLost, match="its supervisor died during a change of the epoch"):
            await stream
        await supervisor.stop()

    _run(story)


def test_workers_of_two_epochs_are_brought_into_a_third(world: World) -> None:
    """Their supervisor has died while they joined: not all have."""

    async def story() -> None:
        first = await world.started("one")
        await handle_of(first, "verify rank 1").actor.leave()
        await world.dies(first)
        group = await world.claimed("two")
        assert "verify rank 1" in str(group.claimed_trouble)
        supervisor = supervised(group)
        await until(lambda: group.epoch == 2 and supervisor.is_ready)
        await supervisor.stop()

    _run(story)


def test_workers_of_no_epoch_are_kept_and_their_first_epoch_is_started_once(world: World) -> None:
    """Their supervisor has died during its first start; one slot was still empty."""

    async def story() -> None:
        workers = world.workers("one")
        for slot in workers.slots[:2]:
            await workers.fill(slot, "start")
        first = WorkerGroup(workers)
        handles = [worker.handle for worker in workers]
        await world.dies(first)
        group = await world.claimed("two")
        assert (group.kind, group.claimed_trouble) == (EpochKind.NONE, None)
        supervisor = supervised(group)
        await supervisor.check()
        assert group.epoch == 1
        assert supervisor.interruptions.number == 0
        assert [worker.handle for worker in group.workers][:2] == handles
        await supervisor.stop()

    _run(story)


def test_workers_that_have_left_their_epoch_join_the_next_at_the_first_attempt(
    world: World,
) -> None:
    """Their supervisor has died between two epochs: they refuse numbers that they have seen."""

    async def story() -> None:
        first = await world.started("one")
        for _ in range(4):
            await first.end_epoch(PeerLost(peer="p", operation="test", reason="test"))
            await first.start_epoch(timeout_s=10.0)
        await first.end_epoch(PeerLost(peer="p", operation="test", reason="test"))
        await world.dies(first)
        group = await world.claimed("two")
        assert (group.kind, group.claimed_trouble, group.epoch) == (EpochKind.NONE, None, 5)
        await group.start_epoch(timeout_s=10.0)
        assert group.epoch == 6
        await group.stop()

    _run(story)


def test_a_degraded_epoch_is_claimed_as_one_and_fails_back(world: World) -> None:
    async def story() -> None:
        first = await world.started("one")
        await lose(first, "drafting actor")
        await first.start_degraded_epoch(timeout_s=10.0)
        await first.restore_draft(timeout_s=10.0)
        await world.dies(first)

        group = await world.claimed("two")
        assert group.kind is EpochKind.DEGRADED
        assert group.claimed_trouble is None
        assert group.leader.slot.name == "fallback in verify rank 0"
        request = toy_request("plain", max_tokens=7)
        assert await answer(group.leader, request) == expected(request)
        supervisor = supervised(group)
        await until(lambda: group.kind is EpochKind.FULL and supervisor.is_ready)
        assert supervisor.interruptions.number == 0
        request = toy_request("full", max_tokens=7)
        assert await answer(group.leader, request) == expected(request)
        await supervisor.stop()

    _run(story)


def test_the_streams_of_a_degraded_epoch_that_lacks_a_worker_are_ended(world: World) -> None:
    async def story() -> None:
        first = await world.started("one")
        await lose(first, "drafting actor")
        await first.start_degraded_epoch(timeout_s=10.0)
        stream = emissions_of(first.leader, toy_request("plain", max_tokens=10_000))
        await anext(stream)
        await world.dies(first)
        world.cluster.kill(handle_of(first, "verify rank 1"))

        group = await world.claimed("two")
        assert "verify rank 1" in str(group.claimed_trouble)
        supervisor = supervised(group)
        with pytest.raises(PeerLost, match="its supervisor died during a change of the epoch"):
            async for _ in stream:
                pass
        await until(lambda: group.kind is EpochKind.FULL and supervisor.is_ready)
        await supervisor.stop()

    _run(story)


@pytest.mark.parametrize("since", ["before the search", "after the search"])
def test_a_worker_that_does_not_answer_is_killed_and_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch, since: str
) -> None:
    monkeypatch.setattr(claim_module, "_ANSWER_S", 0.2)

    async def story() -> None:
        first = await world.started("one")
        frozen = handle_of(first, "verify rank 1")
        await world.dies(first)
        if since == "before the search":
            frozen.thawed.clear()
        orphans = await world.orphans("two")
        assert orphans is not None
        frozen.thawed.clear()
        group = await claim(orphans, world.workers("two", ping_s=0.1))
        assert frozen.killed.is_set()
        assert "verify rank 1" in str(group.claimed_trouble)
        supervisor = supervised(group)
        await until(lambda: group.epoch == 2 and supervisor.is_ready)
        await supervisor.stop()

    _run(story)


def test_a_promoted_head_stays_that_of_the_claimed_workers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        first = await world.started("one")
        leader = first.leader.handle.actor._leader
        monkeypatch.setattr(type(leader), "head_folder", "/heads/two")
        await world.dies(first)
        group = await world.claimed("two")
        assert group.has_other_head
        assert group.workers.spec.engine.model.head == Path("/heads/two")
        await group.stop()

    _run(story)


def test_workers_without_renewals_hold_their_room_until_the_last_has_exited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_room, "_UNRENEWED_S", 1.0)
    bundles = {0: {"CPU": 0.5, "GPU": 1.0}, 1: {"CPU": 0.5}}
    groups = [
        {"name": "app/p/verify/1", "state": "CREATED", "bundles": bundles},
        {"name": "app/p/draft/1", "state": "CREATED", "bundles": {0: {"GPU": 1.0}}},
        {"name": "app/p/draft/0", "state": "REMOVED", "bundles": {0: {"GPU": 9.0}}},
        {"name": "other/q/draft/1", "state": "CREATED", "bundles": {0: {"GPU": 9.0}}},
    ]
    waits = {"name": "next/p/verify/1", "state": "PENDING", "bundles": {0: {"GPU": 2.0}}}
    table = {str(number): group for number, group in enumerate(groups)}
    monkeypatch.setattr(held_room, "placement_group_table", lambda: table)

    async def story() -> None:
        first = await world.started("one")
        await world.dies(first)
        assert await held_rooms(NAMESPACE) == (), "it might be between two heartbeats"

        await until(lambda: all(tenure._left_s < 25.0 - 1.2 for tenure in world.cluster.tenures))
        (room,) = await held_rooms(NAMESPACE)
        assert (room.app, room.pipeline, room.num_workers) == ("app", "p", 3)
        assert room.resources == {"CPU": 1.0, "GPU": 2.0}
        # 25 s, of which more than one has passed, and the wait of the last worker.
        assert 20.0 < room.left_s - LAST_WAIT_S < 24.0
        assert str(replace(room, left_s=26.2)) == (
            "3 workers of pipeline p (application app), which have no supervisor, hold CPU 1, "
            "GPU 2 by their lease for at most 27 s"
        )
        assert await waiting_for_room("next", namespace=NAMESPACE) == "", "it does not wait"
        table["9"] = waits
        reason = await waiting_for_room("next", namespace=NAMESPACE)
        assert reason.startswith("waiting for room: 3 workers of pipeline p (application app)")
        assert await waiting_for_room("nex", namespace=NAMESPACE) == ""

        group = await world.claimed("two")
        supervisor = supervised(group)
        await supervisor.check()
        await until(lambda: all(w.status.epoch for w in group.workers))
        assert await held_rooms(NAMESPACE) == (), "they have a supervisor again"
        await supervisor.stop()

    _run(story)


def test_the_digest_is_of_what_workers_are_started_with(tmp_path: Path) -> None:
    config = _config(tmp_path)
    same = digest_of(config)
    assert digest_of(_config(tmp_path)) == same
    assert digest_of(config.model_copy(update={"app_name": "another"})) == same
    parallel = {"parallel": {"timeout_s": 5.0}}
    assert digest_of(_config(tmp_path, **parallel)) != same
    spares = config.recovery.model_copy(update={"spares": SparesConfig(verify=1)})
    assert digest_of(config.model_copy(update={"recovery": spares})) != same
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    with_weights = digest_of(config)
    assert with_weights != same
    weights.write_bytes(b"22")
    assert digest_of(config) != with_weights


def test_without_workers_there_is_nothing_to_claim(world: World) -> None:
    async def story() -> None:
        assert await world.orphans("one") is None

    _run(story)
