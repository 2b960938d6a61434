"""The simulation against a measured fleet: the same decisions, at nearly the same times.

The measured timeline is that of `python -m tests.autoscaling`. Its clients, its targets and the
mean times of its nodes and starts are the simulation's inputs; decisions and starts its outputs.

Speeds are those of a pipeline that has the machine to itself, and the measured pipelines shared its
two cores: their tokens per second do not follow from it, so that signal is left out here.
"""

import json
from collections.abc import Generator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import simpy

from cluster.fleet.arrivals import Arrival
from cluster.fleet.outcome import Outcome
from cluster.fleet.pipeline import Job
from cluster.fleet.setting import FleetSetting, Speed
from cluster.fleet.simulation import FleetSimulation
from eesd_dist.routing.fleet.size import FleetTargets

ROOT = Path(__file__).parents[4]
MEASURED = ROOT / "docs" / "benchmarks" / "2026-11-25-autoscaling-2cpu.json"
DECISION_BOUND_S = 3.0
START_BOUND_S = 6.0
"""Starts differ by so much from their mean: they share two cores with what runs."""

_UNREACHED = 100.0
SPEEDS = ROOT / "docs" / "benchmarks" / "2026-11-25-batch-2cpu.json"

LENGTHS = (96, 384)
"""Tokens of the answers, in turns."""
NUM_PROMPT_TOKENS = 24

Row = dict[str, Any]


class ClosedLoad(FleetSimulation):
    """Clients that each start their next request when the one before is over, as a benchmark's."""

    def __init__(self, setting: FleetSetting, steps: Sequence[tuple[float, int]]) -> None:
        """`steps`: start times and numbers of clients from then on, in the order of time."""
        super().__init__(setting, (), seed=0)
        self._steps = steps
        self._target = 0
        self._number = 0

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        for at_s, target in self._steps:
            yield self._env.timeout(max(at_s - self._env.now, 0.0))
            self._target = target
            while self._num_live < self._target:
                self._take_next()
        self._load_over_s = self._env.now

    def _ended(self, job: Job) -> None:
        super()._ended(job)
        if self._num_live < self._target:
            self._take_next()

    def _take_next(self) -> None:
        num_tokens = LENGTHS[self._number % len(LENGTHS)]
        self._number += 1
        request = Arrival(
            at_s=self._env.now, num_prompt_tokens=NUM_PROMPT_TOKENS, num_tokens=num_tokens
        )
        self._take(request)


def _times(samples: list[Row], key: str) -> list[float]:
    """Returns when a number of the fleet rose."""
    return [b["at_s"] for a, b in pairwise(samples) if b[key] > a[key] and not b["draining"]]


def _speed() -> Speed:
    """Returns a line through the measured rounds of one request and of eight."""
    rates = json.loads(SPEEDS.read_text())["tokens_per_s"]
    single_s, eight_s = (number / rates[str(number)]["speculation after"] for number in (1, 8))
    request_s = (eight_s - single_s) / 7
    return Speed(fixed_s=single_s - request_s, request_s=request_s, tokens_per_turn=1.0)


@pytest.fixture(scope="module")
def measured() -> Row:
    row: Row = json.loads(MEASURED.read_text())
    return row


@pytest.fixture(scope="module")
def samples(measured: Row) -> list[Row]:
    return list(measured["timeline"]["samples"])


@pytest.fixture(scope="module")
def starts_s(samples: list[Row]) -> list[float]:
    """When a pipeline was ready for the first time: one that was drained for nothing comes back."""
    nodes_s = _times(samples, "nodes")
    return [min(s for s in _times(samples, "ready") if s > node_s) for node_s in nodes_s]


@pytest.fixture(scope="module")
def simulated(measured: Row, samples: list[Row], starts_s: list[float]) -> Outcome:
    decisions_s, nodes_s = _times(samples, "wanted"), _times(samples, "nodes")
    births_s = [node - decision for node, decision in zip(nodes_s, decisions_s, strict=True)]
    loads_s = [ready - node for ready, node in zip(starts_s, nodes_s, strict=True)]
    targets = measured["targets"]
    setting = FleetSetting(
        targets=FleetTargets(
            min_count=targets["min_count"],
            max_count=targets["max_count"],
            live_requests=targets["target_live_requests"],
            utilisation=_UNREACHED,
            up_delay_s=targets["up_delay_s"],
            down_delay_s=targets["down_delay_s"],
            idle_delay_s=targets["idle_delay_s"],
        ),
        speed=_speed(),
        initial=0,
        birth_s=sum(births_s) / len(births_s),
        load_s=sum(loads_s) / len(loads_s),
    )
    steps = [(row["at_s"], row["num_clients"]) for row in samples]
    return ClosedLoad(setting, [*steps, (steps[-1][0] + 1.0, 0)]).run()


def test_the_decisions_are_the_measured_ones(measured: Row, simulated: Outcome) -> None:
    decisions = measured["timeline"]["decisions"][1:]
    assert [change.target for change in simulated.changes] == [d["wanted"] for d in decisions]
    for change, decision in zip(simulated.changes, decisions, strict=True):
        assert change.at_s == pytest.approx(decision["at_s"], abs=DECISION_BOUND_S)


def test_pipelines_are_ready_when_they_were(simulated: Outcome, starts_s: list[float]) -> None:
    assert len(simulated.ready_s) == len(starts_s)
    for ready_s, start_s in zip(simulated.ready_s, starts_s, strict=True):
        assert ready_s == pytest.approx(start_s, abs=START_BOUND_S)


def test_no_request_of_the_measured_load_is_lost(simulated: Outcome) -> None:
    assert (simulated.num_lost, simulated.num_refusals) == (0, 0)
