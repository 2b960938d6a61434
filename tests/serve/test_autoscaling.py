"""Pipelines and nodes follow a load: on a cluster of this machine with nodes that come and go."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]
pytestmark = [pytest.mark.autoscaling, pytest.mark.nightly]


@pytest.fixture(scope="module")
def report(tiny_service: Path) -> Row:
    """Runs the proof with short delays, in a separate process: it has a Ray of its own."""
    command = [sys.executable, "-m", "tests.autoscaling", "--json"]
    options = ["--model", str(tiny_service), "--quick", "--tokens", "200", "--hold-s", "2"]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, *options, "--noise-s", "8", "--timeout-s", "200"],
        capture_output=True,
        text=True,
        timeout=480,
        env=environment,
    )
    assert done.stdout, done.stderr[-3000:]
    report: Row = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def samples(report: Row) -> list[Row]:
    return list(report["timeline"]["samples"])


def _first(samples: list[Row], holds: Callable[[Row], bool], *, after_s: float = -1.0) -> float:
    """Returns when something was first seen after a time."""
    return next(float(row["at_s"]) for row in samples if row["at_s"] > after_s and holds(row))


@pytest.mark.timeout(540)
def test_streams_are_unbroken_and_unchanged_while_pipelines_come_and_go(report: Row) -> None:
    summary = report["summary"]
    assert (summary["broken"], summary["changed"]) == ([], [])
    assert summary["streams"] >= 20
    assert summary["migrated"] >= 1


@pytest.mark.timeout(540)
def test_the_number_goes_from_zero_to_two_and_back(report: Row) -> None:
    decisions = report["timeline"]["decisions"]
    assert [decision["wanted"] for decision in decisions] == [0, 1, 2, 1, 0]
    assert [decision["signal"] for decision in decisions][-1] == "idle"
    assert all(decision["reason"] for decision in decisions)


@pytest.mark.timeout(540)
def test_a_request_that_finds_no_pipeline_starts_one_and_is_served(samples: list[Row]) -> None:
    waits_s = _first(samples, lambda row: row["num_waiting"] > 0)
    node_s = _first(samples, lambda row: row["nodes"] == 1)
    ready_s = _first(samples, lambda row: row["ready"] == 1)
    assert waits_s < node_s < ready_s
    assert (
        _first(samples, lambda row: row["num_waiting"] == 0, after_s=ready_s) < samples[-1]["at_s"]
    )


@pytest.mark.timeout(540)
def test_a_rising_load_adds_a_pipeline_and_a_node_for_it(samples: list[Row]) -> None:
    decision_s = _first(samples, lambda row: row["wanted"] == 2)
    node_s = _first(samples, lambda row: row["nodes"] == 2)
    ready_s = _first(samples, lambda row: row["ready"] == 2)
    assert decision_s < node_s < ready_s


@pytest.mark.timeout(540)
def test_a_load_that_varies_changes_nothing(report: Row) -> None:
    assert report["summary"]["decisions_under_noise"] == 0


@pytest.mark.timeout(540)
def test_a_falling_load_drains_a_pipeline_and_then_its_node_goes(samples: list[Row]) -> None:
    growth_s = _first(samples, lambda row: row["ready"] == 2)
    decision_s = _first(samples, lambda row: row["wanted"] == 1, after_s=growth_s)
    draining_s = _first(samples, lambda row: row["draining"] == 1, after_s=decision_s)
    fewer_s = _first(samples, lambda row: row["count"] == 1, after_s=decision_s)
    gone_s = _first(samples, lambda row: row["nodes"] == 1, after_s=decision_s)
    assert decision_s < draining_s <= fewer_s < gone_s


@pytest.mark.timeout(540)
def test_an_idle_service_ends_without_pipelines_and_nodes(samples: list[Row]) -> None:
    last = samples[-1]
    assert (last["wanted"], last["count"], last["nodes"]) == (0, 0, 0)
