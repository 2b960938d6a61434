"""The router benchmark says what planning costs, and that more live requests do not add to it."""

import json

import pytest

from serve_app.bench.router.measure import LOADS, book_cost
from serve_app.cli.main import main


def test_a_plan_costs_the_same_however_many_requests_live() -> None:
    """Ten thousand times as many: anything but a constant would be far beyond this bound."""
    costs = [book_cost(num_live, repeats=300) for num_live in (1, 10_000)]
    assert costs[1].round_us < 10 * costs[0].round_us
    assert costs[1].request_us < 10 * costs[0].request_us


def test_the_last_line_is_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "router", "--quick", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert set(report["summary"]["round_us"]) == {str(load) for load in LOADS}
    assert all(cost["plan_alone_ms"] > 0 for cost in report["in_process"])
    assert report["provenance"]["seed"] == 0
