"""The heartbeats of a rank: the epoch that it is in, and the round or command."""

import asyncio

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EngineError
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import LoadProgress
from eesd_dist.workers.messages import Epoch, Lease, TelemetryOptions
from eesd_dist.workers.rank_actor import RankActor
from eesd_dist.workers.roles import RankWorker
from tests.support.in_process import epoch
from tests.support.toy_stages import ToyRank, ToyStages, ToyWorker

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


def test_a_rank_that_loads_tells_how_far_it_is() -> None:
    async def run() -> None:
        actor, worker = _actor()
        assert not (await actor.beat(LEASE)).is_busy
        progress = LoadProgress(bytes_done=30, bytes_total=100, piece="layer 1", seconds=1.0)
        worker.loading.of("verify rank 0")(progress)
        status = await actor.beat(LEASE)
        assert (status.phase, status.progress, status.is_busy) == ("loading", 30, True)

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
