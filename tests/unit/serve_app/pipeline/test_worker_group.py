"""What a worker group does with workers that fail alone, and what it learns for the next epoch."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import ConfigError, EngineCrashed, EngineError, LeaseLost, PeerLost
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.workers.epochs import joining
from eesd_dist.workers.messages import ControlReport, Epoch, Lease, LoadedRank
from eesd_dist.workers.roles import DraftFollower, DraftLeader, RankWorker
from serve_app.pipeline.diagnosis import Diagnosis
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.worker import Worker
from serve_app.pipeline.worker_group import WorkerGroup
from tests.support.toy_group import (
    ToyCluster,
    ToyWorkers,
    answer,
    expected,
    handle_of,
    is_filled,
    lose,
    slot_of,
    toy_request,
    until,
)
from tests.support.toy_stages import (
    ToyDrafter,
    ToyLeader,
    ToyRank,
    ToyStages,
    ToyStep,
    ToyWorker,
    held,
)


async def _never() -> None:
    await asyncio.Event().wait()


async def _breaks() -> None:
    await asyncio.sleep(0.01)
    raise RuntimeError("no such device")


class _Spawns(ToyWorkers):
    """Each slot's answer is given."""

    def __init__(
        self, cluster: ToyCluster, folder: Path, answers: dict[str, Callable[[], Awaitable[None]]]
    ) -> None:
        super().__init__(cluster, folder)
        self._answers = answers
        self.num_made: Counter[str] = Counter()

    def _create_actor(self, slot: RankSlot) -> Any:
        self.num_made[slot.name] += 1
        process_info = SimpleNamespace(remote=self._answers.get(slot.name, _never))
        return SimpleNamespace(name=slot.name, process_info=process_info)


def test_when_one_new_worker_fails_those_that_are_still_starting_are_kept_for_the_next_start(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    monkeypatch.setattr("ray.kill", lambda handle: killed.append(handle.name))

    async def run() -> None:
        workers = _Spawns(cluster, tmp_path, {"verify rank 0": _breaks})
        group = WorkerGroup(workers)
        with pytest.raises(EngineError, match="verify rank 0 failed during start"):
            await group.start_epoch(timeout_s=10.0)
        assert not list(group.workers)
        assert group.kind is EpochKind.NONE
        assert killed == ["verify rank 0"]
        with pytest.raises(EngineError, match="verify rank 0 failed during start"):
            await group.start_epoch(timeout_s=10.0)
        assert workers.num_made == {"drafting actor": 1, "verify rank 0": 2, "verify rank 1": 1}
        await group.stop()

    asyncio.run(run())
    assert sorted(killed) == ["drafting actor", *["verify rank 0"] * 2, "verify rank 1"]


class _SlowWorker(ToyWorker):
    """Joins no epoch until it may."""

    def __init__(self, config: EngineConfig, *, rank: int, may_join: threading.Event) -> None:
        super().__init__(config, rank=rank)
        self._may_join = may_join

    def join(self, epoch: Epoch) -> ToyRank:
        self._may_join.wait(30.0)
        return super().join(epoch)


class _SlowStages(ToyStages):
    """The first worker of verify rank 1 is slow."""

    def __init__(self) -> None:
        self.may_join = threading.Event()
        self._num_made = 0

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        if rank == 1:
            self._num_made += 1
        if rank == 1 and self._num_made == 1:
            return _SlowWorker(config, rank=rank, may_join=self.may_join)
        return ToyWorker(config, rank=rank)


@pytest.mark.parametrize("victim", ["drafting actor", "verify rank 0"])
def test_a_worker_that_dies_while_another_loads_ends_the_start_at_once(
    victim: str, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _SlowStages()
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, stages=stages))
        start = asyncio.ensure_future(group.start_epoch(timeout_s=60.0))
        await until(lambda: is_filled(group))
        await until(lambda: "join" in handle_of(group, "verify rank 1").asked)
        handle_of(group, victim).killed.set()
        with pytest.raises(PeerLost, match=rf"{victim}.*its process has died") as lost:
            await asyncio.wait_for(start, 5.0)
        stages.may_join.set()
        await group.end_epoch(lost.value)
        await group.start_epoch(timeout_s=10.0)
        assert group.kind is EpochKind.FULL
        await group.stop()

    asyncio.run(run())


def test_a_worker_that_died_between_two_epochs_is_replaced_by_the_next_start(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        await group.end_epoch(EngineError("failing back"))
        dead = handle_of(group, "verify rank 1")
        dead.killed.set()
        await until(lambda: group.workers.is_empty(slot_of(group, "verify rank 1")))
        await group.start_epoch(timeout_s=10.0)
        assert handle_of(group, "verify rank 1") is not dead
        await group.stop()

    asyncio.run(run())


def test_a_worker_that_is_stuck_in_joining_is_named_and_replaced_and_its_peers_are_not(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_BUILD_S", 0.4)

    async def run() -> None:
        stages = _SlowStages()
        workers = ToyWorkers(cluster, tmp_path, stages=stages, deadline_s=0.4)
        group = WorkerGroup(workers)
        start = asyncio.ensure_future(group.start_epoch(timeout_s=60.0))
        await until(lambda: is_filled(group))
        stuck, peer = handle_of(group, "verify rank 1"), handle_of(group, "verify rank 0")
        stuck.actor._joining._leave_wait_s = 0.1
        why = r"verify rank 1.*during joining an epoch: no progress within 0\.4 s"
        with pytest.raises(PeerLost, match=why) as lost:
            await asyncio.wait_for(start, 10.0)
        await group.end_epoch(lost.value)
        assert stuck.killed.is_set()
        await group.start_epoch(timeout_s=10.0)
        assert handle_of(group, "verify rank 0") is peer
        stages.may_join.set()
        await group.stop()

    asyncio.run(run())


def test_a_loop_that_turns_without_a_token_is_lost_and_an_idle_one_is_not(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, deadline_s=0.4))
        await group.start_epoch(timeout_s=10.0)
        trouble = asyncio.ensure_future(group.trouble())
        await asyncio.sleep(0.8)
        assert not trouble.done(), "there are no requests"
        request = toy_request("stuck", max_tokens=100)
        with held(group.workers.spec.engine, spinning=True):
            stream = asyncio.ensure_future(answer(group.leader, request))
            error = await asyncio.wait_for(trouble, 5.0)
        assert str(error) == (
            "lost drafting actor (pid 1 on here) during rounds (epoch 1): no progress within 0.4 s"
        )
        stuck = handle_of(group, "drafting actor")
        await group.end_epoch(error)
        with pytest.raises(PeerLost, match="no progress"):
            await asyncio.wait_for(stream, 5.0)
        assert stuck.killed.is_set()
        await group.stop()

    asyncio.run(run())


@pytest.mark.parametrize("is_crash", [True, False])
def test_the_trouble_of_an_epoch_ends_its_streams_and_only_a_crash_counts_against_them(
    is_crash: bool, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        request = toy_request("r", max_tokens=10_000)
        stream = asyncio.ensure_future(answer(group.leader, request))
        leader = group.leader
        await until(lambda: leader.status.num_live == 1)
        await group.end_epoch(EngineError("the reason"), is_crash=is_crash)
        kind = EngineCrashed if is_crash else PeerLost
        with pytest.raises(kind, match="the reason"):
            await asyncio.wait_for(stream, 5.0)
        assert leader.handle is handle_of(group, "drafting actor"), "it stays, with its weights"
        await group.stop()

    asyncio.run(run())


def test_a_worker_of_another_supervisor_is_trouble_of_its_own_kind(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        trouble = asyncio.ensure_future(group.trouble())
        claimed = handle_of(group, "verify rank 0").actor
        await claimed.claim(Lease(owner="replica-2", seconds=60.0), "replica-1")
        error = await asyncio.wait_for(trouble, 5.0)
        assert isinstance(error, LeaseLost)
        assert "replica-2, not replica-1" in str(error)
        await group.stop()

    asyncio.run(run())


@dataclass
class _Costs(ToyStages):
    """Leaders that report the costs that they have measured, or were given."""

    costs: list[object] = field(default_factory=list)

    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return _MeasuredLeader(config, self.costs)


class _MeasuredLeader(ToyLeader):
    def __init__(self, config: EngineConfig, costs: list[object]) -> None:
        super().__init__(config)
        self._costs = costs

    def prepare(self, *, cost: Mapping[str, object] | None = None) -> LoadedRank:
        self._costs.append(cost)
        return super().prepare(cost=cost)

    def control(self) -> ControlReport:
        return replace(super().control(), cost={"round_s": 0.5})


def test_a_new_drafting_actor_on_the_same_node_gets_the_costs_that_the_last_one_measured(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _Costs()
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, stages=stages))
        await group.start_epoch(timeout_s=10.0)
        await until(lambda: group._preparations._cost is not None)
        await lose(group, "drafting actor")
        await group.start_epoch(timeout_s=10.0)
        assert stages.costs == [None, {"round_s": 0.5}]
        await group.stop()

    asyncio.run(run())


class _Follower(ToyWorker):
    def load_head(self, folder: str) -> str:
        return f"digest of {folder} on node {self._rank}"


class _OtherHeads(ToyStages):
    """Heads that differ from node to node."""

    def draft_follower(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> DraftFollower:
        return _Follower(config, rank=rank)


def test_a_head_that_differs_between_nodes_is_refused_and_one_that_does_not_fit_too(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        workers = ToyWorkers(
            cluster, tmp_path, num_draft_ranks=1, fallback=False, stages=ToyStages()
        )
        group = WorkerGroup(workers)
        await group.start_epoch(timeout_s=10.0)
        with pytest.raises(ConfigError, match="toys draft without a head"):
            await group.load_head("/heads/two")
        assert not group.has_other_head
        await group.stop()

        stages = _OtherHeads()
        workers = ToyWorkers(cluster, tmp_path, num_draft_ranks=3, fallback=False, stages=stages)
        group = WorkerGroup(workers)
        await group.start_epoch(timeout_s=10.0)
        with pytest.raises(ConfigError, match="not the same exit head on every node"):
            await group.load_head("/heads/two")
        assert not group.has_other_head
        assert "load_head" not in handle_of(group, "drafting actor").asked
        await group.stop()

    asyncio.run(run())


def test_a_head_that_was_set_is_that_of_new_workers_until_it_is_reset(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        before = [handle_of(group, slot.name) for slot in group.workers.slots]
        group.set_head("/heads/two")
        assert group.has_other_head
        assert group.workers.spec.engine.model.head == Path("/heads/two")
        await group.reset_head()
        assert not group.has_other_head
        assert all(handle.killed.is_set() for handle in before)
        await group.start_epoch(timeout_s=10.0)
        request = toy_request("after", max_tokens=5)
        assert await answer(group.leader, request) == expected(request)
        await group.stop()

    asyncio.run(run())


def test_a_group_that_is_stopped_leaves_no_worker(tmp_path: Path, cluster: ToyCluster) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, num_draft_ranks=2))
        await group.start_epoch(timeout_s=10.0)
        group.workers.start_spawn(slot_of(group, "verify rank 0"), "test")
        await group.stop()
        assert not cluster.actors

    asyncio.run(run())


@dataclass
class _Hanging(ToyStages):
    """A leader with rounds that hang, whatever its epoch is told."""

    hangs: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)

    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return _HangingLeader(config, self)


class _HangingLeader(ToyLeader):
    def __init__(self, config: EngineConfig, stages: _Hanging) -> None:
        super().__init__(config)
        self._stages = stages

    def join(self, epoch: Epoch, *, new_engine: bool) -> ToyDrafter:
        del epoch, new_engine
        return _HangingDrafter(self._config, self._stages)


class _HangingDrafter(ToyDrafter):
    def __init__(self, config: EngineConfig, stages: _Hanging) -> None:
        super().__init__(config)
        self._stages = stages

    def step(self, *, wait_s: float) -> ToyStep:
        if self._stages.hangs.is_set():
            self._stages.is_over.wait(60.0)
        return super().step(wait_s=wait_s)


def test_a_worker_that_hangs_ends_its_streams_with_the_reason_and_is_killed_without_more_waiting(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _Hanging()
        group = WorkerGroup(
            ToyWorkers(
                cluster, tmp_path, fallback=False, stages=stages, deadline_s=0.4, farewell_s=0.2
            )
        )
        await group.start_epoch(timeout_s=10.0)
        trouble = asyncio.ensure_future(group.trouble())
        request = toy_request("r", max_tokens=10_000)
        stream = asyncio.ensure_future(answer(group.leader, request))
        await until(lambda: group.leader.status.num_live == 1)
        stages.hangs.set()
        error = await asyncio.wait_for(trouble, 5.0)
        assert "lost drafting actor" in str(error)
        stuck, rank = handle_of(group, "drafting actor"), handle_of(group, "verify rank 0")
        began_s = time.monotonic()
        await group.end_epoch(error)
        assert time.monotonic() - began_s < 2.0, "a loop that ends has five seconds"
        with pytest.raises(PeerLost, match=r"no progress within 0\.4 s"):
            await asyncio.wait_for(stream, 5.0)
        assert stuck.killed.is_set()
        assert not rank.killed.is_set()
        stages.is_over.set()
        await group.stop()

    asyncio.run(run())


class _Rank(ToyRank):
    """It reports the loss of verify rank 1 when it is told to; a stuck one does not leave."""

    def __init__(self, stages: "_Accusing", *, is_stuck: bool) -> None:
        super().__init__()
        self._stages = stages
        self._is_stuck = is_stuck

    def run(self) -> None:
        if self._is_stuck:
            self._stages.is_over.wait(60.0)
            return
        while not self._left.wait(0.01):
            if self._stages.accuses.is_set():
                raise PeerLost(
                    peer="verify rank 1 on here",
                    operation="all_reduce of round 7",
                    reason="no answer within 20 s",
                )


class _RankWorker(ToyWorker):
    def __init__(self, config: EngineConfig, stages: "_Accusing", *, rank: int) -> None:
        super().__init__(config, rank=rank)
        self._stages = stages

    def join(self, epoch: Epoch) -> ToyRank:
        del epoch
        if self._rank == 0:
            return _Rank(self._stages, is_stuck=False)
        return _Rank(self._stages, is_stuck=True) if self._stages.is_stuck else ToyRank()


@dataclass
class _Accusing(ToyStages):
    """Verify rank 0 reports that it has waited in vain for rank 1."""

    is_stuck: bool
    accuses: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return _RankWorker(config, self, rank=rank)


@pytest.mark.parametrize("is_stuck", [True, False])
def test_a_rank_that_others_wait_for_in_vain_is_killed_unless_it_leaves_at_once(
    is_stuck: bool, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _Accusing(is_stuck)
        workers = ToyWorkers(cluster, tmp_path, fallback=False, stages=stages, farewell_s=0.5)
        group = WorkerGroup(workers)
        await group.start_epoch(timeout_s=10.0)
        handles = {m.slot.name: handle_of(group, m.slot.name) for m in group.workers}
        trouble = asyncio.ensure_future(group.trouble())
        await asyncio.sleep(0)
        stages.accuses.set()
        error = await asyncio.wait_for(trouble, 5.0)
        assert str(error).startswith("lost verify rank 1 on here during all_reduce of round 7")
        began_s = time.monotonic()
        await group.end_epoch(error)
        assert time.monotonic() - began_s < 2.0
        killed = {name for name, handle in handles.items() if handle.killed.is_set()}
        assert killed == ({"verify rank 1"} if is_stuck else set())
        stages.is_over.set()
        await group.stop()

    asyncio.run(run())


def test_a_shared_leader_is_accused_by_the_name_that_it_has_among_verify_ranks(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path, fallback=False)
        for mode in ("shared", "dedicated"):
            slot = replace(workers.slots[0], mode=mode)
            worker = SimpleNamespace(slot=slot, failure=asyncio.Future())
            diagnosis = Diagnosis(workers)
            diagnosis._accused = {"verify rank 0"}
            assert diagnosis.is_suspect(cast("Worker", worker)) is (mode == "shared")

    asyncio.run(run())
