"""Ranks agree on weights and on the number of KV pages before every epoch, replacements too."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.schedule.kv_pages import KvRoom
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.workers.messages import Epoch, LoadedRank
from eesd_dist.workers.roles import RankWorker
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import engine_on
from tests.support.toy_group import (
    VERIFY_SPARE,
    ToyCluster,
    ToyWorkers,
    engine_of,
    lose,
    supervised,
    until,
)
from tests.support.toy_stages import ToyRank, ToyStages, ToyWorker

PAGE = 32


@dataclass
class _Uneven(ToyStages):
    """Verify ranks with rooms of their own, and the numbers of pages that they were told."""

    num_pages: dict[int, int]
    weights: dict[int, str] = field(default_factory=dict)
    products: dict[int, str] = field(default_factory=dict)
    agreements: list[tuple[int, int]] = field(default_factory=list)

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return _UnevenRank(config, rank=rank, stages=self)


class _UnevenRank(ToyWorker):
    def __init__(self, config: EngineConfig, *, rank: int, stages: _Uneven) -> None:
        super().__init__(config, rank=rank)
        self._stages = stages
        room = KvRoom(budget_bytes=stages.num_pages[rank] * 10, page_bytes=10)
        self._loaded = LoadedRank(
            weights=stages.weights.get(rank, ""),
            products=stages.products.get(rank, ""),
            room=room,
        )

    def prepare(self) -> LoadedRank:
        return self._loaded

    def join(self, epoch: Epoch) -> ToyRank:
        self._stages.agreements.append((self._rank, epoch.num_pages))
        return super().join(epoch)


def test_the_rank_with_the_least_room_decides_and_later_ranks_keep_the_number(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _Uneven({0: 70, 1: 50})
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, stages=stages, fallback=False))
        assert group.kv_capacity is None
        await group.start_epoch(timeout_s=10.0)
        capacity = group.kv_capacity
        assert capacity is not None
        assert (capacity.num_pages, capacity.num_tokens) == (50, 50 * PAGE)
        assert capacity.rank_bytes == {
            "drafting actor": 50,
            "verify rank 0": 500,
            "verify rank 1": 500,
        }
        stages.num_pages = {0: 900, 1: 900}
        for victim in ("verify rank 1", "verify rank 0", "drafting actor"):
            await lose(group, victim)
            await group.start_epoch(timeout_s=10.0)
        assert set(stages.agreements) == {(0, 50), (1, 50)}
        await group.stop()

    asyncio.run(run())


def test_a_replacement_with_less_room_ends_the_pipeline_with_one_clear_error(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _Uneven({0: 70, 1: 50})
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, stages=stages, fallback=False))
        supervisor = supervised(group)
        await until(lambda: supervisor.is_ready)
        stages.num_pages = {0: 70, 1: 49}
        (worker,) = [m for m in group.workers if m.slot.name == "verify rank 1"]
        worker.handle.killed.set()
        await until(lambda: "given up" in supervisor.why_unavailable())
        assert (
            "verify rank 1 can hold 49 KV pages (490 bytes), and the other ranks of its pipeline "
            "have 50 (500 bytes here)" in supervisor.why_unavailable()
        )

    asyncio.run(run())


def test_a_spare_that_takes_a_slot_is_told_the_number_that_the_pipeline_has(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        stages = _Uneven({0: 70, 1: 50})
        workers = ToyWorkers(
            cluster, tmp_path, stages=stages, fallback=False, spares=[VERIFY_SPARE]
        )
        group = WorkerGroup(workers)
        await group.start_epoch(timeout_s=10.0)
        await until(lambda: group.workers.spares.ready)
        stages.num_pages[1] = 60
        await lose(group, "verify rank 1")
        assert not group.workers.is_empty(group.workers.slots[-1]), "the spare has the slot"
        await group.start_epoch(timeout_s=10.0)
        assert set(stages.agreements) == {(0, 50), (1, 50)}
        await group.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("field_name", "value", "message"),
    [
        ("weights", "f00d" * 16, "has read other weights than drafting actor: f00df00df0"),
        ("products", "compiled bfloat16 pairs", "multiplies with compiled bfloat16 pairs"),
    ],
)
def test_a_rank_with_other_weights_or_products_is_refused_by_name_at_the_next_epoch(
    tmp_path: Path, cluster: ToyCluster, field_name: str, value: str, message: str
) -> None:
    async def run() -> None:
        stages = _Uneven({0: 50, 1: 50})
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, stages=stages, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        getattr(stages, field_name)[1] = value
        await lose(group, "verify rank 1")
        with pytest.raises(ConfigError, match=f"verify rank 1 {message}"):
            await group.start_epoch(timeout_s=10.0)
        await group.stop()

    asyncio.run(run())


def test_a_rank_that_fails_to_load_is_replaced_for_the_next_epoch(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        rank = next(m for m in group.workers if m.slot.name == "verify rank 1")

        def fails() -> LoadedRank:
            raise RuntimeError("an illegal memory access was encountered")

        rank.handle.actor._worker.prepare = fails
        with pytest.raises(EngineError, match="illegal memory access") as caught:
            await group.start_epoch(timeout_s=10.0)
        await group.end_epoch(caught.value)
        assert rank.handle.killed.is_set()
        await group.start_epoch(timeout_s=10.0)
        await group.stop()

    asyncio.run(run())


def test_a_fallback_with_other_weights_takes_no_part(tmp_path: Path, cluster: ToyCluster) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path))
        await group.start_epoch(timeout_s=10.0)
        await lose(group, "drafting actor")
        host = next(m for m in group.workers if m.slot.name == "verify rank 0").handle.actor
        leader = host._fallback._leader
        other = replace(leader.prepare(), weights="0ther")
        leader.prepare = lambda **_: other
        with pytest.raises(ConfigError, match="fallback in verify rank 0 has read other weights"):
            await group.start_degraded_epoch(timeout_s=10.0)
        await group.stop()

    asyncio.run(run())


def test_a_rank_with_a_part_of_a_gpu_uses_that_part_of_its_memory(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, num_draft_ranks=1, fallback=False)
    slot = RankSlot(name="verify rank 0", rank=0, resources={"GPU": 0.5, "CPU": 1.0})
    assert engine_on(slot, engine).cache.gpu_memory_utilization == 0.45
    for resources in ({"CPU": 1.0}, {"GPU": 1.0}):
        assert engine_on(replace(slot, resources=resources), engine) is engine
