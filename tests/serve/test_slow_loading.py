"""A model that loads for two minutes: streams outlive every kill with default settings."""

import os
import signal
import time
from pathlib import Path

import pytest
from ray import serve

from eesd_dist.config import EngineConfig
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request
from eesd_dist.workers.messages import Epoch
from eesd_dist.workers.roles import DraftLeader, RankWorker
from tests.serve.test_recovery import _expected, _request, _toy_pipeline
from tests.support.running import Running, tokens_of
from tests.support.toy_stages import ToyDrafter, ToyLeader, ToyRank, ToyStages, ToyWorker

LOAD_S = 120.0


class _SlowLeader(ToyLeader):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._is_loaded = False

    def join(self, epoch: Epoch, *, new_engine: bool) -> ToyDrafter:
        if not self._is_loaded:
            time.sleep(LOAD_S)
            self._is_loaded = True
        return super().join(epoch, new_engine=new_engine)


class _SlowWorker(ToyWorker):
    def __init__(self, config: EngineConfig, *, rank: int) -> None:
        super().__init__(config, rank=rank)
        self._is_loaded = False

    def join(self, epoch: Epoch) -> ToyRank:
        if not self._is_loaded:
            time.sleep(LOAD_S)
            self._is_loaded = True
        return super().join(epoch)


class _SlowStages(ToyStages):
    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return _SlowLeader(config)

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return _SlowWorker(config, rank=rank)


def _killed_under(slow: Running, victim: str, request: Request) -> float:
    """Returns how long its stream paused."""
    items = slow.items(request)
    tokens = tokens_of([next(items)])
    state = slow.state()
    pids = {worker.name: worker.pid for worker in state.workers} | {"replica": state.pid}
    os.kill(pids[victim], signal.SIGKILL)
    pauses_s = []
    last_s = time.monotonic()
    for item in items:
        tokens += tokens_of([item])
        pauses_s.append(time.monotonic() - last_s)
        last_s = time.monotonic()
    assert tokens == _expected(request)
    return max(pauses_s)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_streams_outlive_a_rank_a_drafting_actor_and_a_replica_of_a_model_that_loads_for_minutes(
    ray_port: int, tmp_path: Path
) -> None:
    slow = _toy_pipeline("slow", tmp_path, stages=_SlowStages)
    start_s = slow.state().start_s
    assert start_s is not None
    assert start_s > LOAD_S
    assert slow.config.recovery.pause_for(start_s) > 3 * LOAD_S
    for victim in ("verify rank 1", "drafting actor"):
        assert _killed_under(slow, victim, _request(victim, max_tokens=300)) > LOAD_S
    # A stream of two tokens a round, 50 rounds a second, that goes on until the claim is over.
    assert _killed_under(slow, "replica", _request("replica", max_tokens=3000)) < 5.0
    assert slow.state().num_interruptions == 0, "the new replica has loaded nothing"
    assert slow.state().start_s == pytest.approx(start_s, abs=2 * LOAD_S)
    serve.delete("slow")
