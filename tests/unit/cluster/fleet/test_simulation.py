"""The simulation of a fleet: laws of queues, equal seeds, and no request lost."""

from dataclasses import replace
from random import Random

import pytest

from cluster.fleet.arrivals import Arrival, Lengths, Rate, arrivals, bursts, constant, day
from cluster.fleet.outcome import Outcome, quantile
from cluster.fleet.setting import FleetSetting, Speed
from cluster.fleet.simulation import FleetSimulation
from eesd_dist.routing.fleet.size import FleetTargets

TARGETS = FleetTargets(
    min_count=1, max_count=6, live_requests=8.0, up_delay_s=10.0, down_delay_s=120.0
)
SETTING = FleetSetting(targets=TARGETS, birth_s=30.0, load_s=30.0)
FIXED = replace(TARGETS, min_count=2, max_count=2)


def load(rate: Rate, *, highest: float, lasting_s: float = 1800.0, seed: int = 0) -> list[Arrival]:
    rng = Random(seed)
    return list(arrivals(rate, highest=highest, lasting_s=lasting_s, lengths=Lengths(), rng=rng))


def run(setting: FleetSetting, requests: list[Arrival], *, seed: int = 0) -> Outcome:
    return FleetSimulation(setting, requests, seed=seed).run()


def test_littles_law_holds() -> None:
    """L = lambda W over a run that begins and ends empty (Little 1961)."""
    outcome = run(replace(SETTING, targets=FIXED, initial=2), load(constant(2.0), highest=2.0))
    lasted_s = outcome.lasted_s
    mean_live = outcome.live_area / lasted_s
    arrival_rate = outcome.num_over / lasted_s
    mean_sojourn_s = sum(outcome.sojourn_s) / outcome.num_over
    assert outcome.num_over > 3000
    assert mean_live == pytest.approx(arrival_rate * mean_sojourn_s, rel=1e-9)


def test_a_lone_request_takes_as_long_as_its_rounds() -> None:
    speed = Speed(fixed_s=0.03, request_s=0.002, tokens_per_turn=2.0, prompt_share=0.01)
    request = Arrival(at_s=1.0, num_prompt_tokens=400, num_tokens=100)
    outcome = run(replace(SETTING, speed=speed, targets=FIXED, initial=2), [request])
    per_token_s = 0.032 / 2.0
    assert outcome.first_token_s == [pytest.approx((4.0 + 1.0) * per_token_s, abs=1e-4)]
    assert outcome.sojourn_s == [pytest.approx(104.0 * per_token_s, abs=1e-4)]


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    setting = replace(SETTING, mean_life_s=600.0)
    requests = load(constant(3.0), highest=3.0)
    first, second = run(setting, requests, seed=1), run(setting, requests, seed=1)
    assert (first.summary(), first.changes) == (second.summary(), second.changes)
    assert first.sojourn_s == second.sojourn_s
    assert run(setting, requests, seed=2).summary() != first.summary()


def test_deaths_of_nodes_lose_no_request() -> None:
    outcome = run(replace(SETTING, mean_life_s=200.0), load(constant(2.0), highest=2.0))
    assert outcome.num_deaths > 10
    assert outcome.num_moves > 0
    assert outcome.num_lost == 0


def test_a_request_that_no_pipeline_can_end_is_lost_and_the_run_is_over() -> None:
    """Its prompt takes 30 s, and no node lives as long."""
    request = Arrival(at_s=1.0, num_prompt_tokens=100_000, num_tokens=5)
    outcome = run(replace(SETTING, mean_life_s=0.5, patience_s=3600.0), [request])
    assert outcome.num_deaths > 50
    assert outcome.num_lost == 1
    assert outcome.lasted_s == pytest.approx(3601.0, abs=SETTING.look_s)
    assert outcome.live_area == pytest.approx(outcome.lasted_s - 1.0)


def test_more_load_gets_more_pipelines_and_they_go_again() -> None:
    rate = bursts(1.0, factor=8.0, period_s=1800.0, lasting_s=600.0)
    outcome = run(SETTING, load(rate, highest=8.0, lasting_s=3600.0))
    assert outcome.num_lost == 0
    assert max(change.target for change in outcome.changes) >= 3
    assert any(not change.is_up for change in outcome.changes)


def test_from_zero_every_request_waits_and_is_served() -> None:
    targets = replace(TARGETS, min_count=0, idle_delay_s=60.0)
    requests = [Arrival(at_s=10.0 + i, num_prompt_tokens=10, num_tokens=50) for i in range(5)]
    tail = [Arrival(at_s=900.0, num_prompt_tokens=10, num_tokens=50)]
    outcome = run(replace(SETTING, targets=targets, initial=0), requests + tail)
    assert outcome.num_over == 6
    assert [change.target for change in outcome.changes] == [1, 0, 1]
    assert min(outcome.first_token_s) >= 55.0


def test_requests_beyond_the_limit_are_refused_while_no_pipeline_serves() -> None:
    targets = replace(TARGETS, min_count=0)
    requests = [Arrival(at_s=1.0, num_prompt_tokens=10, num_tokens=5) for _ in range(20)]
    outcome = run(replace(SETTING, targets=targets, initial=0, max_waiting=12), requests)
    assert (outcome.num_refusals, outcome.num_over, outcome.num_lost) == (8, 12, 0)


def test_the_shipped_policy_does_not_flap_and_one_without_hysteresis_is_caught() -> None:
    requests = load(constant(6.0), highest=6.0, lasting_s=3600.0)
    steady = run(SETTING, requests)
    hasty = replace(TARGETS, shrink_at=0.99, up_delay_s=0.0, down_delay_s=0.0)
    nervous = run(replace(SETTING, targets=hasty), requests)
    assert steady.num_flaps() == 0
    assert nervous.num_flaps() > 5


def test_a_day_has_its_peak_at_noon() -> None:
    rate = day(10.0, trough=2.0)
    assert rate(0.0) == pytest.approx(2.0)
    assert rate(43_200.0) == pytest.approx(10.0)


def test_thinning_keeps_the_rate() -> None:
    requests = load(bursts(1.0, factor=5.0, period_s=100.0, lasting_s=20.0), highest=5.0)
    assert len(requests) == pytest.approx(1800 * (0.8 + 0.2 * 5.0), rel=0.06)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.01, 1.0), (0.5, 5.0), (0.9, 9.0), (0.91, 10.0)]
)
def test_a_quantile_is_the_least_value_that_the_share_does_not_exceed(
    share: float, expected: float
) -> None:
    assert quantile([float(value) for value in range(10, 0, -1)], share) == expected
    assert quantile([], share) == 0.0
