"""The heartbeats of a rank: the epoch that it is in, and the round or command."""

import asyncio

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EngineError
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import LoadProgress
from eesd_dist.workers.messages import Epoch, Lease, TelemetryOptions, WorkerIdentity
from eesd_dist.workers.rank_actor import RankActor
from eesd_dist.workers.roles import RankWorker
from eesd_dist.workers.tenure import Tenure
from tests.support.in_process import epoch
from tests.support.toy_stages import NoPages, ToyRank, ToyStages, ToyWorker

LEASE = Lease(owner="supervisor", seconds=60.0)


class _Rank(ToyRank):
    """A rank that is in a given round."""

    def __init__(self) -> None:
        super().__init__()
        self.round: int | None = None

    def number(self) -> int | None:
        return self.round


class _Worker(ToyWorker):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, rank=0)
        self.ranks: list[_Rank] = []

    def join(self, epoch: Epoch) -> ToyRank:
        self.ranks.append(_Rank())
        return self.ranks[-1]


class _Stages(ToyStages):
    def __init__(self, worker: _Worker) -> None:
        self._worker = worker

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return self._worker


def _actor(*, fallback: bool = False) -> tuple[RankActor, _Worker]:
    config = EngineConfig.model_validate(
        {"model": {"path": "."}, "parallel": {"fallback": fallback}}
    )
    worker = _Worker(config)
    actor = RankActor(
        config,
        name="verify rank 0",
        stage="verify",
        rank=0,
        stages=_Stages(worker),
        telemetry=TelemetryOptions(model_name="toy"),
    )
    return actor, worker


def test_a_rank_is_busy_while_it_is_in_a_round_and_its_progress_is_the_round() -> None:
    async def run() -> None:
        actor, worker = _actor()
        for number in (1, 2):
            await actor.join(epoch(number))
            rank = worker.ranks[-1]
            for in_round, expected in ((None, (0, False)), (7, (7, True)), (8, (8, True))):
                rank.round = in_round
                status = await actor.beat(LEASE)
                assert (status.progress, status.is_busy) == expected
                assert (status.epoch, status.phase) == (number, "")
            assert await actor.leave(EngineError("another rank has crashed"), True)
            assert (await actor.beat(LEASE)).epoch == 0

    asyncio.run(run())


def test_a_rank_tells_how_many_chunks_of_pages_it_has_migrated_apart_from_its_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        actor, worker = _actor()
        await actor.join(epoch(1))
        worker.ranks[-1].round = 7
        monkeypatch.setattr(NoPages, "num_moved", 3)
        status = await actor.beat(LEASE)
        assert (status.progress, status.num_moved) == (7, 3)
        assert await actor.leave()

    asyncio.run(run())


def test_a_rank_that_loads_tells_how_far_it_is() -> None:
    async def run() -> None:
        actor, worker = _actor()
        assert not (await actor.beat(LEASE)).is_busy
        progress = LoadProgress(bytes_done=30, bytes_total=100, piece="layer 1", seconds=1.0)
        worker.loading.of("verify rank 0")(progress)
        status = await actor.beat(LEASE)
        assert (status.phase, status.progress, status.is_busy) == ("loading", 30, True)
        assert status.load is not None
        assert (status.load.bytes_done, status.load.module) == (30, "layer 1")

    asyncio.run(run())


def test_a_fallback_answers_heartbeats_and_has_no_lease_of_its_own() -> None:
    async def run() -> None:
        actor, _ = _actor(fallback=True)
        for owner in ("one", "two"):
            status = await actor.fallback("beat", Lease(owner=owner, seconds=1.0))
            assert status.epoch == 0  # type: ignore[attr-defined]
        with pytest.raises(AssertionError, match="a fallback is not claimed"):
            await actor.fallback("claim", LEASE, "")

    asyncio.run(run())


class _Ranks(ToyStages):
    """Notes the ranks that were built."""

    def __init__(self) -> None:
        self.built: list[int] = []

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        self.built.append(rank)
        return ToyWorker(config, rank=rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spare_is_built_for_the_rank_whose_slot_it_takes(rank: int) -> None:
    async def run() -> None:
        stages = _Ranks()
        identity = WorkerIdentity(app="a", pipeline="p", slot="verify spare 0", digest="d")
        tenure = Tenure(identity, lease_s=60.0, expired=lambda: None, tick_s=0.01)
        parallel = {"fallback": True, "verify_tensor_parallel_size": 2}
        actor = RankActor(
            EngineConfig.model_validate({"model": {"path": "."}, "parallel": parallel}),
            name="verify spare 0",
            stage="verify",
            rank=0,
            stages=stages,
            telemetry=TelemetryOptions(model_name="toy"),
            tenure=lambda: tenure,
        )
        await actor.take_slot(f"verify rank {rank}", rank)
        assert stages.built == [0, rank]
        assert tenure.identity.slot == f"verify rank {rank}"
        assert tenure.identity.bundle == "verify spare 0"
        await actor.join(epoch(1))
        assert (await actor.beat(LEASE)).epoch == 1
        if rank == 0:
            assert await actor.fallback("live") == ()
        else:
            with pytest.raises(EngineError, match="verify rank 1 of p has no fallback"):
                await actor.fallback("live")
        assert await actor.leave()
        tenure._left_s = 0.0

    asyncio.run(run())
