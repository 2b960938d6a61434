"""The wanted number of pipelines: bounded, monotone in load, steady under noise, never too low."""

import math
from collections.abc import Iterable
from copy import deepcopy
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.errors import ConfigError
from eesd_dist.routing.activity import Activity
from eesd_dist.routing.fleet.size import (
    FleetDecision,
    FleetLoad,
    FleetSize,
    FleetTargets,
    PipelineLoad,
    need_of,
)

TARGETS = FleetTargets(
    min_count=0,
    max_count=8,
    live_requests=10.0,
    first_token_s=2.0,
    up_delay_s=5.0,
    down_delay_s=30.0,
    idle_delay_s=60.0,
)
LOADS = st.lists(st.integers(0, 120), min_size=1, max_size=200)


def fleet_load(live: float, *, count: int, waiting: int = 0) -> FleetLoad:
    """The live requests, spread over so many pipelines."""
    share, remainder = divmod(round(live), max(count, 1))
    if count == 0:
        return FleetLoad(num_waiting=round(live) + waiting)
    pipelines = tuple(PipelineLoad(num_live=share + (i < remainder)) for i in range(count))
    return FleetLoad(pipelines=pipelines, num_waiting=waiting)


def run(
    size: FleetSize, lives: Iterable[float], *, start_s: float = 0.0
) -> list[tuple[float, FleetDecision]]:
    """Looks once a second; every pipeline that is wanted serves at once."""
    seen = []
    for second, live in enumerate(lives):
        load = fleet_load(live, count=size.decision.target)
        seen.append((live, size.look(load, time_s=start_s + second)))
    return seen


def direction_changes(seen: list[tuple[float, FleetDecision]]) -> int:
    counts = [decision.target for _, decision in seen]
    steps = [b - a for a, b in pairwise(counts) if b != a]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


@given(LOADS, st.integers(0, 3), st.integers(3, 8), st.integers(0, 12))
def test_the_number_stays_within_its_bounds_and_steps(
    lives: list[int], min_count: int, max_count: int, count: int
) -> None:
    targets = FleetTargets(
        min_count=min_count,
        max_count=max_count,
        live_requests=10.0,
        up_delay_s=2.0,
        down_delay_s=3.0,
    )
    size = FleetSize(targets, count=count, time_s=0.0)
    before = min(max(count, min_count), max_count)
    for _, decision in run(size, lives):
        assert min_count <= decision.target <= max_count
        assert before - 1 <= decision.target <= before + targets.max_step
        before = decision.target


@given(LOADS, st.integers(0, 8))
def test_the_number_is_never_lowered_below_what_live_requests_need(
    lives: list[int], count: int
) -> None:
    before = count
    for live, decision in run(FleetSize(TARGETS, count=count, time_s=0.0), lives):
        if decision.target < before:
            assert decision.target * TARGETS.live_requests >= live
        before = decision.target


@given(st.integers(0, 80), st.integers(0, 8))
def test_a_steady_load_gets_what_it_needs_and_keeps_it(live: int, count: int) -> None:
    seen = run(FleetSize(TARGETS, count=count, time_s=0.0), [live] * 400)
    last = seen[-1][1].target
    assert last >= math.ceil(live / TARGETS.live_requests)
    assert last == 0 or last <= math.ceil(live / TARGETS.live_requests / TARGETS.shrink_at) + 1
    assert direction_changes(seen) == 0


@given(LOADS, st.integers(0, 8), st.integers(0, 90), st.integers(0, 40))
def test_with_the_same_history_more_load_never_gets_fewer_pipelines(
    lives: list[int], count: int, live: int, extra: int
) -> None:
    size = FleetSize(TARGETS, count=count, time_s=0.0)
    run(size, lives)
    other, time_s = deepcopy(size), float(len(lives))
    serving = max(size.decision.target, 1)
    less = size.look(fleet_load(live, count=serving), time_s=time_s)
    more = other.look(fleet_load(live + extra, count=serving), time_s=time_s)
    assert more.target >= less.target


@given(st.integers(0, 90), st.integers(0, 40), st.integers(0, 8))
def test_a_greater_steady_load_never_ends_with_fewer_pipelines(
    live: int, extra: int, count: int
) -> None:
    less = run(FleetSize(TARGETS, count=count, time_s=0.0), [live] * 500)
    more = run(FleetSize(TARGETS, count=count, time_s=0.0), [live + extra] * 500)
    assert more[-1][1].target >= less[-1][1].target


@given(st.integers(0, 2**32), st.floats(1.0, 80.0), st.integers(1, 8))
def test_noise_within_17_percent_does_not_flap(seed: int, base: float, count: int) -> None:
    rng = Random(seed)
    lives = [base * rng.uniform(0.83, 1.17) for _ in range(600)]
    # KV use has fractions: rounding to whole requests alone could exceed the noise.
    size = FleetSize(TARGETS, count=count, time_s=0.0)
    seen = []
    for second, live in enumerate(lives):
        used = PipelineLoad(activity=Activity(kv_use=live / 10.0 * TARGETS.kv_use), num_live=1)
        decision = size.look(FleetLoad(pipelines=(used,)), time_s=float(second))
        seen.append((live, decision))
    assert direction_changes(seen) <= (1 if count > base / 10.0 else 0)


def test_a_policy_without_hysteresis_flaps_under_the_same_noise() -> None:
    """The check above can fail."""
    rng = Random(1)
    lives = [30.0 * rng.uniform(0.83, 1.17) for _ in range(600)]
    targets = FleetTargets(
        max_count=8, live_requests=10.0, shrink_at=0.99, up_delay_s=0.0, down_delay_s=0.0
    )
    assert direction_changes(run(FleetSize(targets, count=3, time_s=0.0), lives)) > 10


def test_a_short_burst_adds_nothing() -> None:
    lives = [5.0] * 10 + [60.0] * 4 + [5.0] * 10
    assert {d.target for _, d in run(FleetSize(TARGETS, count=1, time_s=0.0), lives)} == {1}


def test_the_first_request_of_an_idle_service_starts_a_pipeline_at_once() -> None:
    size = FleetSize(TARGETS, count=0, time_s=0.0)
    assert size.look(FleetLoad(), time_s=100.0).target == 0
    decision = size.look(FleetLoad(num_waiting=3), time_s=101.0)
    assert (decision.target, decision.signal) == (1, "queue")
    assert decision.reason == (
        "up from 0 to 1: 3 requests wait and no pipeline is ready, which needs 0.30, for 0 s"
    )


def test_an_idle_service_gives_up_its_last_pipeline_after_the_delay() -> None:
    size = FleetSize(TARGETS, count=1, time_s=0.0)
    seen = run(size, [0.0] * 62)
    assert [d.target for _, d in seen] == [1] * 60 + [0] * 2
    assert seen[-1][1].signal == "idle"


def test_what_was_measured_before_the_last_request_ended_is_no_need() -> None:
    slow = PipelineLoad(
        activity=Activity(tokens_per_s=50.0, kv_use=0.5, first_token_s=9.0), max_tokens_per_s=100.0
    )
    size = FleetSize(TARGETS, count=0, time_s=0.0)
    assert size.look(FleetLoad(pipelines=(slow,)), time_s=1.0).target == 0


def test_one_live_request_keeps_the_last_pipeline() -> None:
    seen = run(FleetSize(TARGETS, count=1, time_s=0.0), [1.0] * 500)
    assert {d.target for _, d in seen} == {1}


def test_pipelines_that_start_count_as_capacity_to_come() -> None:
    size = FleetSize(TARGETS, count=1, time_s=0.0)
    for second in range(60):  # the second pipeline takes a minute to start
        size.look(fleet_load(18.0, count=1), time_s=float(second))
    assert size.decision.target == 2


@pytest.mark.parametrize(
    ("activity", "capacity", "signal", "needs"),
    [
        pytest.param(Activity(num_waiting=4), None, "queue", 2.0, id="queue"),
        pytest.param(Activity(kv_use=0.95), None, "kv", 0.95 / 0.85, id="KV pages"),
        pytest.param(Activity(tokens_per_s=90.0), 100.0, "tokens", 90.0 / 85.0, id="tokens"),
        pytest.param(Activity(first_token_s=3.0), None, "first", 1.5, id="first token"),
    ],
)
def test_each_signal_alone_adds_a_pipeline(
    activity: Activity, capacity: float | None, signal: str, needs: float
) -> None:
    pipeline = PipelineLoad(num_live=8, activity=activity, max_tokens_per_s=capacity)
    load = FleetLoad(pipelines=(pipeline,))
    need = need_of(load, TARGETS)
    assert (need.signal, need.count) == (signal, pytest.approx(needs))
    size = FleetSize(TARGETS, count=1, time_s=0.0)
    for second in range(7):
        size.look(load, time_s=float(second))
    assert (size.decision.target, size.decision.signal) == (2, signal)


def test_new_bounds_apply_at_the_next_look() -> None:
    size = FleetSize(TARGETS, count=5, time_s=0.0)
    size.targets = FleetTargets(min_count=1, max_count=2)
    decision = size.look(FleetLoad(), time_s=1.0)
    assert (decision.target, decision.signal) == (2, "bounds")


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_count": 3},
        {"min_count": 0, "max_count": 0},
        {"max_step": 0},
        {"shrink_at": 1.0},
        {"shrink_at": 0.0},
        {"down_delay_s": -1.0},
    ],
)
def test_targets_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        FleetTargets(**{"max_count": 2, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["live_requests", "utilisation", "kv_use", "first_token_s"])
def test_a_target_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0.0: it must be above 0"):
        FleetTargets(**{name: 0.0})  # type: ignore[arg-type]
