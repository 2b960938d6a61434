"""Spares take the slots of lost workers, and are replaced."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from eesd_dist.config import EngineConfig
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.workers.messages import ControlReport, HeadReport, Lease, LoadedRank
from eesd_dist.workers.roles import DraftLeader
from serve_app.config import SparesConfig
from serve_app.pipeline.claim import Orphans, claim
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.placement.rank_slots import rank_slots
from serve_app.pipeline.supervisor import Supervisor
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.placement_config import PlacementConfig
from tests.support.toy_group import (
    DRAFT_SPARE,
    VERIFY_SPARE,
    ToyCluster,
    ToyHandle,
    ToyIngress,
    ToyWorkers,
    answer,
    expected,
    handle_of,
    lose,
    supervised,
    toy_request,
    until,
)
from tests.support.toy_stages import ToyLeader, ToyStages

SPARES = (DRAFT_SPARE, VERIFY_SPARE)


def _ready(group: WorkerGroup) -> list[str]:
    return sorted(spare.slot.name for spare in group.workers.spares.ready)


def _spare(group: WorkerGroup, name: str) -> ToyHandle:
    (handle,) = [w.handle for w in group.workers.spares.ready if w.slot.name == name]
    assert isinstance(handle, ToyHandle)
    return handle


def _run(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(40.0):
            await story()

    asyncio.run(run())


async def _started(workers: ToyWorkers, *, num_spares: int = 2) -> tuple[WorkerGroup, Supervisor]:
    group = WorkerGroup(workers)
    supervisor = supervised(group)
    await supervisor.check()
    await until(lambda: len(_ready(group)) == num_spares)
    return group, supervisor


@pytest.mark.parametrize(
    ("victim", "spare"), [("drafting actor", "draft spare 0"), ("verify rank 1", "verify spare 0")]
)
@pytest.mark.parametrize("fallback", [False, True])
def test_a_spare_takes_the_slot_of_a_lost_worker_again_and_again_and_no_token_is_lost(
    victim: str, spare: str, fallback: bool, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def told() -> None:
        workers = ToyWorkers(cluster, tmp_path, fallback=fallback, spares=SPARES)
        group, supervisor = await _started(workers)
        request = toy_request("r", max_tokens=200)
        ingress = ToyIngress(supervisor, request)
        stream = asyncio.ensure_future(ingress.answer())
        for epoch in (2, 3, 4):
            seen = ingress.num_tokens
            await until(lambda seen=seen: ingress.num_tokens > seen + 4)
            ready_spare = _spare(group, spare)
            handle_of(group, victim).killed.set()
            await until(lambda epoch=epoch: group.epoch == epoch and supervisor.is_ready)
            assert handle_of(group, victim) is ready_spare
            assert group.kind is EpochKind.FULL
            await until(lambda: len(_ready(group)) == 2)
            assert _spare(group, spare) is not ready_spare
        assert await stream == expected(request)
        assert supervisor.degraded_s == 0.0, "the spare was faster than a fallback"
        await supervisor.stop()
        assert not cluster.actors

    _run(told)


@dataclass
class _Loads(ToyStages):
    """Counts the loads of drafting actors; those after the first wait."""

    may_load: threading.Event = field(default_factory=threading.Event)
    num_loaded: int = 0

    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return _SlowLeader(config, self)


class _SlowLeader(ToyLeader):
    def __init__(self, config: EngineConfig, loads: _Loads) -> None:
        super().__init__(config)
        self._loads = loads
        self._is_loaded = False

    def prepare(self, *, cost: Mapping[str, object] | None = None) -> LoadedRank:
        if not self._is_loaded:
            if self._loads.num_loaded:
                assert self._loads.may_load.wait(20.0)
            self._is_loaded = True
            self._loads.num_loaded += 1
        return super().prepare(cost=cost)


def test_a_draft_spare_is_ready_when_its_weights_are_and_its_taking_loads_nothing(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def told() -> None:
        loads = _Loads()
        workers = ToyWorkers(cluster, tmp_path, fallback=False, stages=loads, spares=SPARES)
        group = WorkerGroup(workers)
        await group.start_epoch(timeout_s=10.0)
        await until(lambda: _ready(group) == ["verify spare 0"])
        await asyncio.sleep(0.2)
        assert _ready(group) == ["verify spare 0"]
        assert loads.num_loaded == 1
        loads.may_load.set()
        await until(lambda: len(_ready(group)) == 2)
        assert loads.num_loaded == 2
        loads.may_load.clear()
        await lose(group, "drafting actor")
        await group.start_epoch(timeout_s=5.0)
        assert loads.num_loaded == 2
        loads.may_load.set()
        await group.stop()

    _run(told)


def test_a_lost_worker_is_spawned_where_no_spare_is_left_and_two_losses_share_one_spare(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def told() -> None:
        workers = ToyWorkers(cluster, tmp_path, fallback=False, spares=[VERIFY_SPARE])
        group, supervisor = await _started(workers, num_spares=1)
        ready_spare = _spare(group, "verify spare 0")
        before = {handle_of(group, f"verify rank {r}") for r in (0, 1)}
        for handle in before:
            handle.killed.set()
        await until(lambda: group.epoch == 2 and supervisor.is_ready)
        after = {handle_of(group, f"verify rank {r}") for r in (0, 1)}
        assert ready_spare in after
        assert not before & after
        request = toy_request("after", max_tokens=9)
        assert await answer(group.leader, request) == expected(request)
        await supervisor.stop()

    _run(told)


@pytest.mark.parametrize("fault", ["dies", "freezes"])
def test_a_spare_that_is_lost_is_replaced_and_no_stream_pauses(
    fault: str, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def told() -> None:
        workers = ToyWorkers(
            cluster, tmp_path, spares=SPARES, deadline_s=0.3, busy_s=0.3, ping_s=0.1
        )
        group, supervisor = await _started(workers)
        lost = _spare(group, "verify spare 0")
        if fault == "dies":
            lost.killed.set()
        else:
            lost.thawed.clear()
        await until(lambda: _ready(group) == ["draft spare 0"])
        await until(lambda: len(_ready(group)) == 2)
        assert _spare(group, "verify spare 0") is not lost
        assert lost.killed.is_set()
        assert (group.epoch, supervisor.interruptions.number) == (1, 0)
        await supervisor.stop()

    _run(told)


def test_a_spare_that_does_not_take_its_slot_costs_no_epoch(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def told() -> None:
        workers = ToyWorkers(cluster, tmp_path, fallback=False, spares=SPARES, ping_s=0.1)
        group, supervisor = await _started(workers)
        frozen = _spare(group, "verify spare 0")
        frozen.thawed.clear()
        handle_of(group, "verify rank 0").killed.set()
        await until(lambda: group.epoch == 2 and supervisor.is_ready)
        assert frozen.killed.is_set()
        assert handle_of(group, "verify rank 0") is not frozen
        await supervisor.stop()

    _run(told)


def test_a_claimant_gets_the_spares_too_and_knows_whose_bundles_they_use(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def told() -> None:
        first = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, spares=SPARES))
        await first.start_epoch(timeout_s=10.0)
        await until(lambda: len(_ready(first)) == 2)
        await lose(first, "verify rank 1")
        await first.start_epoch(timeout_s=10.0)
        await until(lambda: len(_ready(first)) == 2)
        former_spare = handle_of(first, "verify rank 1")
        present = (*first.workers, *first.workers.spares.ready)
        for worker in present:
            worker.stop_beating()
        first._preparations.end()

        tenancies = {n: await h.actor.tenancy() for n, h in cluster.actors.items()}
        second = ToyWorkers(cluster, tmp_path, fallback=False, spares=SPARES, owner="replica-2")
        group = await claim(Orphans(pipeline="p", workers=tenancies), second)
        assert group.claimed_trouble is None
        assert handle_of(group, "verify rank 1") is former_spare
        assert second._bundles == first.workers._bundles
        assert second._bundles["verify rank 1"] is VERIFY_SPARE
        await until(lambda: len(_ready(group)) == 2)
        assert {w.handle for w in (*group.workers, *second.spares.ready)} == {
            w.handle for w in present
        }
        await group.stop()
        assert not cluster.actors

    _run(told)


def test_spares_of_a_supervisor_that_has_lost_its_lease_are_left_alone(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def told() -> None:
        group, supervisor = await _started(ToyWorkers(cluster, tmp_path, spares=SPARES))
        spares = [_spare(group, name) for name in _ready(group)]
        lease = Lease(owner="replica-2", seconds=60.0)
        for handle in tuple(cluster.actors.values()):
            await handle.actor.claim(lease, "replica-1")
        await until(lambda: not supervisor.is_ready)
        await asyncio.sleep(0.2)
        assert not any(handle.killed.is_set() for handle in spares)

    _run(told)


class _HeadLeader(ToyLeader):
    """Takes any exit head."""

    @property
    def head_folder(self) -> str:
        return str(self._config.model.head)

    def load_head(self, folder: str, *, sha256: str | None = None) -> None:
        model = self._config.model.model_copy(update={"head": Path(folder)})
        self._config = self._config.model_copy(update={"model": model})

    def control(self) -> ControlReport:
        head = HeadReport(folder=self.head_folder, sha256="", exit_layer=1, kind="mlp")
        return replace(super().control(), head=head)


class _Heads(ToyStages):
    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return _HeadLeader(config)


def test_a_promoted_head_is_that_of_the_spares_too(tmp_path: Path, cluster: ToyCluster) -> None:
    async def told() -> None:
        workers = ToyWorkers(cluster, tmp_path, fallback=False, stages=_Heads(), spares=SPARES)
        group, supervisor = await _started(workers)
        before = _spare(group, "draft spare 0")
        await group.load_head("/heads/two")
        assert before.killed.is_set()
        await until(lambda: len(_ready(group)) == 2)
        assert _spare(group, "draft spare 0").actor._leader.head_folder == "/heads/two"
        await supervisor.stop()
        assert not cluster.actors

    _run(told)


def test_slots_of_spares_follow_those_of_the_ranks_and_need_what_these_need() -> None:
    slots = rank_slots(
        PlacementConfig.model_validate({"verify": {"num_cpus": 2}}),
        num_verify_ranks=2,
        gpus_per_rank=1.0,
        num_draft_spares=1,
        num_verify_spares=2,
    )
    assert [slot.name for slot in slots if slot.is_spare] == [
        "draft spare 0",
        "verify spare 0",
        "verify spare 1",
    ]
    actor, first, _, draft_spare, *verify_spares = slots
    assert draft_spare.resources == actor.resources
    assert all(spare.resources == first.resources for spare in verify_spares)
    assert draft_spare.may_take(actor)
    assert not draft_spare.may_take(first)
    assert not verify_spares[0].may_take(actor)


def test_a_number_of_spares_is_not_negative() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        SparesConfig(verify=-1)
