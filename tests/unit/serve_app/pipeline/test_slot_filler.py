"""A death during a start costs the process that died, and not the start."""

import asyncio
import threading
from pathlib import Path

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import PeerLost
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.workers.messages import LoadedRank
from eesd_dist.workers.roles import RankWorker
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.slot_filler import MAX_REPLACEMENTS
from serve_app.pipeline.worker_group import WorkerGroup
from tests.support.toy_group import ToyCluster, ToyHandle, ToyWorkers, handle_of, is_filled, until
from tests.support.toy_stages import ToyStages, ToyWorker


class _HeldWorker(ToyWorker):
    """Has loaded its weights once it may."""

    def __init__(self, config: EngineConfig, *, rank: int, may_load: threading.Event) -> None:
        super().__init__(config, rank=rank)
        self._may_load = may_load

    def prepare(self) -> LoadedRank:
        assert self._may_load.wait(30.0)
        return super().prepare()


class _HeldStages(ToyStages):
    """Verify rank 1 loads slowly."""

    def __init__(self) -> None:
        self.may_load = threading.Event()

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        if rank == 1:
            return _HeldWorker(config, rank=rank, may_load=self.may_load)
        return ToyWorker(config, rank=rank)


@pytest.mark.parametrize("victims", [["drafting actor"], ["drafting actor", "verify rank 0"]])
def test_workers_that_die_while_another_loads_are_replaced_within_the_same_start(
    victims: list[str], tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _HeldStages()
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, stages=stages))
        start = asyncio.ensure_future(group.start_epoch(timeout_s=60.0))
        await until(lambda: is_filled(group))
        slow = handle_of(group, "verify rank 1")
        await until(lambda: "prepare" in slow.asked)
        lost = [handle_of(group, name) for name in victims]
        for handle in lost:
            handle.killed.set()
        await until(lambda: is_filled(group) and not _present(group) & set(lost))
        stages.may_load.set()
        await asyncio.wait_for(start, 10.0)
        assert group.kind is EpochKind.FULL
        assert group.epoch == 1
        assert handle_of(group, "verify rank 1") is slow
        assert "leave" not in slow.asked, "it is in no epoch"
        await group.stop()

    asyncio.run(run())


def test_a_worker_that_was_lost_while_it_loaded_itself_is_replaced(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _HeldStages()
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, stages=stages))
        start = asyncio.ensure_future(group.start_epoch(timeout_s=60.0))
        await until(lambda: is_filled(group))
        dead = handle_of(group, "verify rank 1")
        await until(lambda: "prepare" in dead.asked)
        dead.killed.set()
        stages.may_load.set()
        await asyncio.wait_for(start, 10.0)
        assert group.epoch == 1
        assert handle_of(group, "verify rank 1") is not dead
        await group.stop()

    asyncio.run(run())


def test_a_worker_that_dies_at_every_load_ends_the_start_and_is_named(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    class Mortal(ToyWorkers):
        num_spawned = 0

        def _create_actor(self, slot: object) -> ToyHandle:
            handle = super()._create_actor(slot)  # type: ignore[arg-type]
            if getattr(slot, "name", "") == "verify rank 1":
                type(self).num_spawned += 1
                handle.actor.prepare = lambda *_: _die(handle)
            return handle

    async def _die(handle: ToyHandle) -> None:
        handle.killed.set()
        await asyncio.Event().wait()

    async def run() -> None:
        group = WorkerGroup(Mortal(cluster, tmp_path, fallback=False))
        with pytest.raises(PeerLost, match=r"verify rank 1.*its process has died"):
            await asyncio.wait_for(group.start_epoch(timeout_s=60.0), 10.0)
        assert Mortal.num_spawned == MAX_REPLACEMENTS + 1
        await group.stop()

    asyncio.run(run())


def _present(group: WorkerGroup) -> set[ToyHandle]:
    return {worker.handle for worker in group.workers}
