"""The accounts of the loop cover its wall-clock time: named work, idle time, and the rest."""

import statistics
import threading
import time

import pytest
import torch
from msgspec.structs import replace

from eesd_dist.config import SchedulerConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import build_draft_engine, build_verify_stage
from eesd_dist.engine.round_stats import LoopClock
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.types import RoundStats, SpeculationParams
from tests.support.paired_channel import memory_pair
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import SAMPLING, requests
from tests.unit.engine.test_overlap import memory_engine


def test_unnamed_time_is_other_and_every_verdict_starts_a_new_account() -> None:
    clock = LoopClock(time_s=100.0)
    clock.spent(2.0)
    clock.idled(5.0)
    clock.spent(1.0)
    first = clock.verdict(time_s=108.5)
    assert (first.idle_s, first.other_s) == (5.0, 0.5)
    clock.spent(1.0)
    second = clock.verdict(time_s=109.75)
    assert (second.idle_s, second.other_s) == (0.0, 0.25)


@pytest.mark.alone
@pytest.mark.parametrize("overlap", [False, True])
def test_the_rounds_accounts_add_up_to_the_wall_clock(
    overlap: bool, make_config: MakeConfig
) -> None:
    config = make_config(
        speculation=SpeculationConfig(max_draft_tokens=4),
        scheduler=SchedulerConfig(overlap=overlap),
    )
    engine = memory_engine(config)
    sampling = next(iter(SAMPLING.values()))
    for request in requests(3, sampling, SpeculationParams(controller="fixed"), "a"):
        engine.add(request)
    rounds: list[RoundStats] = []
    while not rounds:  # the first account contains the profile
        rounds += engine.step(wait_s=0.0).rounds
    started_s = time.perf_counter()
    rounds.clear()
    while engine.has_work:
        time.sleep(0.002)  # time of the caller, in no named account
        rounds += engine.step(wait_s=0.0).rounds
    wall_s = time.perf_counter() - started_s
    accounts_s = sum(
        r.plan_s + r.draft_s + r.waited_s + r.commit_s + r.idle_s + r.other_s for r in rounds
    )
    assert accounts_s == pytest.approx(wall_s, rel=0.15)
    assert 0.002 * len(rounds) < sum(r.other_s for r in rounds) < 0.9 * wall_s


@pytest.mark.alone
def test_a_round_behind_another_one_is_queued_and_that_is_no_transfer(
    make_config: MakeConfig,
) -> None:
    torch.set_num_threads(1)
    config = make_config(
        speculation=SpeculationConfig(max_draft_tokens=2),
        scheduler=SchedulerConfig(overlap=True),
    )
    stage = build_verify_stage(config, SingleGroup())
    channel, source = memory_pair(timeout_s=20.0)

    def verify_slowly() -> None:
        while (round_message := source.next_round()) is not None:
            started_s = time.perf_counter()
            reply = stage.verify(*round_message)
            time.sleep(0.1)
            took_s = time.perf_counter() - started_s
            source.reply(replace(reply, verify_s=took_s, received_to_sent_s=took_s))

    verifier = threading.Thread(target=verify_slowly)
    verifier.start()
    cost = CostModel(draft_step_s=0.001, verify_s=(0.1,) * 9)
    engine = build_draft_engine(config, channel, cost=cost)
    sampling = next(iter(SAMPLING.values()))
    for request in requests(2, sampling, SpeculationParams(mode="off"), "a"):
        engine.add(request)
    rounds: list[RoundStats] = []
    while len(rounds) < 8:
        rounds += engine.step(wait_s=0.0).rounds
    for request in requests(2, sampling, SpeculationParams(mode="off"), "a"):
        engine.abort(request.request_id)
    engine.close()
    verifier.join(10)
    inner = rounds[3:]
    queued = [stats.queued_s for stats in inner]
    # Verifying takes a tenth of a second, and so does the queue behind the other microbatch.
    assert statistics.median(queued) > 0.05
    assert statistics.median(stats.transfer_s for stats in inner) < 0.05
