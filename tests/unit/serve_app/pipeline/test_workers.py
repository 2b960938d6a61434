"""Workers are spawned, watched and claimed; what fails in them is reported as this project's
errors, with their names."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from eesd_dist.errors import (
    PROCESS_DIED,
    CheckpointError,
    ConfigError,
    EngineError,
    LeaseLost,
    PeerLost,
)
from eesd_dist.workers import crash_report
from eesd_dist.workers.messages import WorkerIdentity
from eesd_dist.workers.tenure import Tenure
from serve_app.pipeline import worker as worker_module
from serve_app.pipeline import workers
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.worker import Worker
from tests.support.toy_group import VERIFY_SPARE, ToyCluster, ToyHandle, ToyWorkers, until


def test_a_damaged_checkpoint_is_told_with_the_rank_and_the_node_that_saw_it() -> None:
    error = CheckpointError(file="/m/model-00002.safetensors", found="a hole", expected="none")
    failure = worker_module.converted(
        error, peer="verify rank 1 (pid 7 on 10.0.0.3)", operation="start"
    )
    assert isinstance(failure, ConfigError)
    assert str(failure) == (
        "verify rank 1 (pid 7 on 10.0.0.3): /m/model-00002.safetensors: found a hole, expected none"
    )


def test_what_ray_says_of_a_death_tells_processes_from_nodes_and_links() -> None:
    of_node = RayActorError(error_msg="The actor died because its node has died. Node Id: 1")
    assert worker_module._why_gone(RayActorError()) == PROCESS_DIED
    assert worker_module._why_gone(of_node) == "its node has died"
    cut = ActorUnavailableError("RpcError", None)
    assert worker_module._why_gone(cut) == "its process has died, or the link to it"


def test_the_end_of_a_process_is_told_where_ray_knows_more_than_its_connection() -> None:
    of_signal = RayActorError(
        error_msg="The actor died unexpectedly before finishing this task.\n\tpid: 71\n The actor "
        "is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
        "detail: Worker exits with an exit code 7. Some common causes include: (1) the process was "
    )
    reason = worker_module._why_gone(of_signal)
    assert reason == "its process has died: Worker exits with an exit code 7"
    assert worker_module.pid_of(of_signal) == 71
    of_link = RayActorError(
        error_msg="Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
        "End of file. Some common causes include: (1) the process was killed by the OOM killer"
    )
    assert worker_module._why_gone(of_link) == PROCESS_DIED
    assert worker_module.pid_of(of_link) is None


@pytest.mark.parametrize("is_full", [False, True])
def test_a_process_that_dies_while_it_starts_is_told_with_its_last_words_or_the_full_disk(
    is_full: bool, tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker-0a-01000000-71.err").write_text(
        ":job_id:01000000\nloading\nlibgomp: out of memory\n"
    )
    monkeypatch.setattr(crash_report, "log_folder", lambda: tmp_path)
    died = RayActorError(error_msg="The actor died unexpectedly.\n\tpid: 71\n")

    def require_room() -> None:
        if is_full and has_tried:
            raise EngineError("no space on the disk of /tmp")

    has_tried = False

    class Dying(ToyWorkers):
        def _create_actor(self, slot: RankSlot) -> Any:
            nonlocal has_tried
            has_tried = True
            return SimpleNamespace(
                process_info=SimpleNamespace(remote=lambda: _raises(died)), killed=asyncio.Event()
            )

    async def story() -> None:
        spawns = Dying(cluster, tmp_path, require_room=require_room)
        expected = "no space on the disk" if is_full else "its last words: libgomp: out of memory"
        with pytest.raises(EngineError, match=expected):
            await spawns.fill(spawns.slots[0], "start")

    asyncio.run(story())


def test_a_process_that_ray_ends_for_want_of_memory_is_lost_like_any_other() -> None:
    error = OutOfMemoryError("Task was killed due to the node running low on memory.")
    failure = worker_module.converted(error, peer="verify rank 1", operation="loading")
    assert isinstance(failure, PeerLost)
    assert "its process has died: ended by Ray, since its node ran out of memory" in str(failure)

    class Handle:
        forever = SimpleNamespace(remote=lambda: _raises(error))

    assert asyncio.run(worker_module.death_of(Handle())) == worker_module._why_gone(error)


async def _raises(error: Exception) -> None:
    raise error


def test_a_new_worker_that_is_no_longer_needed_is_killed(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story() -> None:
        spawns = ToyWorkers(cluster, tmp_path)
        spawn = spawns.start_spawn(spawns.slots[0], "start")
        worker = await spawn
        workers._kill_spawned(spawn)
        assert worker.handle.killed.is_set()
        await until(lambda: worker.death.cancelled() and worker._beating.cancelled())
        second_spawn = spawns.start_spawn(spawns.slots[1], "start")
        workers._kill_spawned(second_spawn)
        await asyncio.wait({second_spawn})
        assert second_spawn.cancelled()
        workers._kill_spawned(second_spawn)

    asyncio.run(story())


class _SlowToStart(ToyWorkers):
    """The first actors never answer, as on a node that is cut off."""

    def __init__(self, *args: Any, num_silent: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made: list[ToyHandle] = []
        self._num_silent = num_silent

    def _create_actor(self, slot: RankSlot) -> ToyHandle:
        handle = super()._create_actor(slot)
        self.made.append(handle)
        if len(self.made) <= self._num_silent:
            handle.thawed.clear()
        return handle


def test_a_process_that_does_not_start_is_killed_and_tried_again_with_twice_the_time(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        spawns = _SlowToStart(cluster, tmp_path, num_silent=2, spawn_s=0.1)
        slot = spawns.slots[0]
        began_s = asyncio.get_running_loop().time()
        await spawns.fill(slot, "start")
        assert asyncio.get_running_loop().time() - began_s >= 0.3
        assert [handle.killed.is_set() for handle in spawns.made] == [True, True, False]
        assert spawns.at(slot).handle is spawns.made[-1]
        await spawns.release_all()

    asyncio.run(run())


def test_a_slot_without_a_worker_says_so(tmp_path: Path, cluster: ToyCluster) -> None:
    async def run() -> None:
        empty = ToyWorkers(cluster, tmp_path)
        with pytest.raises(PeerLost, match="drafting actor during call: its process is gone"):
            empty.at(empty.slots[0])

    asyncio.run(run())


def _tenure(worker: Worker) -> Tenure:
    tenure = worker.handle.actor._tenure
    assert isinstance(tenure, Tenure)
    return tenure


def test_a_worker_belongs_to_its_supervisor_before_the_first_heartbeat_and_keeps_to_it(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path, owner="replica-1")
        handle = workers._create_actor(workers.slots[0])
        assert (await handle.actor.tenancy()).owner == "replica-1"
        workers.start_s = 7.0
        await workers.fill(workers.slots[0], "start")
        worker = workers.at(workers.slots[0])
        slot = "drafting actor"
        identity = WorkerIdentity(app="app", pipeline="p", slot=slot, digest="d", bundle=slot)
        assert _tenure(worker).identity == identity
        await until(lambda: _tenure(worker)._start_s == 7.0)  # the lease carries it
        await workers.release_all()

    asyncio.run(run())


def test_heartbeats_renew_the_lease_and_without_them_it_runs_down(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path)
        await workers.fill(workers.slots[0], "start")
        worker = workers.at(workers.slots[0])
        tenure = _tenure(worker)
        tenure._left_s = 1.0
        await until(lambda: tenure._left_s > 5.0)
        worker.stop_beating()
        await asyncio.sleep(0.05)
        left_s = tenure._left_s
        await until(lambda: tenure._left_s < left_s, within_s=5.0)
        await workers.release_all()

    asyncio.run(run())


def test_a_worker_is_claimed_once_with_its_process_and_the_second_supervisor_is_refused(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        dead = ToyWorkers(cluster, tmp_path, owner="replica-1")
        await dead.fill(dead.slots[0], "start")
        lost = dead.at(dead.slots[0])
        lost.stop_beating()
        ((name, handle),) = cluster.actors.items()
        tenancy = await handle.actor.tenancy()

        second = ToyWorkers(cluster, tmp_path, owner="replica-2")
        worker = await second.claim(name, tenancy)
        assert worker.handle is handle
        assert second.at(second.slots[0]) is worker
        assert worker.slot == lost.slot

        third = ToyWorkers(cluster, tmp_path, owner="replica-3")
        with pytest.raises(LeaseLost, match="is claimed by replica-2"):
            await third.claim(name, tenancy)
        assert not list(third)
        assert not handle.killed.is_set()
        await second.release_all()

    asyncio.run(run())


def test_a_lost_worker_that_may_live_behind_a_cut_link_does_not_keep_its_bundle(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story() -> None:
        spawns = ToyWorkers(cluster, tmp_path)
        slot = spawns.slots[0]
        await spawns.fill(slot, "start")
        (lost,) = spawns
        lost.death.cancel()
        lost.death = asyncio.ensure_future(asyncio.sleep(0, "its process has died, or the link"))
        await until(lambda: spawns.is_empty(slot))
        assert not lost.handle.killed.is_set()
        await spawns.fill(slot, "start")
        assert lost.handle.killed.is_set()
        assert not spawns.is_empty(slot)
        await spawns.release_all()

    asyncio.run(story())


def test_a_spare_that_is_being_taken_when_that_is_given_up_is_ended(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story() -> None:
        spawns = ToyWorkers(cluster, tmp_path, spares=[VERIFY_SPARE])
        spare = await spawns._spawned(VERIFY_SPARE, "start of a spare")
        spawns.spares.add(spare)
        spawns.spares._ready.add(VERIFY_SPARE.name)
        spare.handle.thawed.clear()
        filling = asyncio.ensure_future(spawns.fill(spawns.slots[-1], "start"))
        await until(lambda: not spawns.spares.ready)
        filling.cancel()
        await asyncio.wait({filling})
        assert spare.handle.killed.is_set()
        await until(spare._beating.cancelled)
        await spawns.release_all()

    asyncio.run(story())
