"""Autoscaling as metrics and as JSON."""

import json

from eesd_dist.routing.fleet.departure import FleetState
from eesd_dist.routing.fleet.size import FleetDecision, FleetTargets
from serve_app.cli.pipelines import _fleet_line
from serve_app.ingress.metrics_page import fleet_as_json, fleet_page

STATE = FleetState(
    decision=FleetDecision(target=2, signal="live", reason="up from 1 to 2: load", since_s=12.4),
    targets=FleetTargets(min_count=1, max_count=4),
    count=2,
    num_ready=1,
    num_draining=0,
    num_waiting=3,
    leaving="",
    num_changes={("up", "live"): 2, ("down", "idle"): 1},
)


def test_metrics_have_the_numbers_and_the_decisions_by_signal() -> None:
    page = fleet_page(STATE).decode()
    for line in (
        "eesd_fleet_wanted 2.0",
        "eesd_fleet_ready 1.0",
        "eesd_fleet_starting 1.0",
        "eesd_fleet_unserved 3.0",
        'eesd_fleet_decisions_total{direction="up",signal="live"} 2.0',
        'eesd_fleet_decisions_total{direction="down",signal="idle"} 1.0',
    ):
        assert line in page.splitlines()


def test_operators_read_one_line() -> None:
    page = json.loads(json.dumps(fleet_as_json(STATE)))
    assert _fleet_line(page) == (
        "wanted 2 of 1 to 4 (ready 1, starting 1, draining 0, 3 requests wait) for 12 s: up from 1 "
        "to 2: load"
    )
