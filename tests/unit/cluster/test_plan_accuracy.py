"""The forecast against recorded figures: rounds of the bundled model on two CPU cores."""

import json
from pathlib import Path

import msgspec
import pytest

from cluster.link_figures import read_links
from cluster.planning.checkpoint import read_shape
from cluster.planning.shapes import on_cpu
from eesd_dist.bench.costs.form import RoundCost, read_costs
from eesd_dist.bundled_model import BUNDLED_MODEL
from serve_app.cli.main import main
from tests.support.plan_accuracy import Comparison, compare

RECORDED = Path(__file__).parents[3] / "docs/benchmarks/2026-11-25-plan-2cpu.json"


def _comparisons() -> list[Comparison]:
    report = json.loads(RECORDED.read_text())
    measured = {
        int(ranks): [msgspec.convert(cost, RoundCost) for cost in rounds]
        for ranks, rounds in report["rounds"].items()
    }
    shape = on_cpu(read_shape(BUNDLED_MODEL))
    return compare(shape, read_costs(RECORDED), read_links(RECORDED), measured)


def test_two_ranks_and_other_batches_are_predicted_within_fifteen_percent() -> None:
    comparisons = _comparisons()
    settings = {
        (comparison.setting.verify_tp, comparison.setting.num_requests)
        for comparison in comparisons
    }
    assert settings >= {(1, 4), (1, 16), (2, 1), (2, 4), (2, 8), (2, 16)}
    assert {comparison.setting.num_draft_tokens for comparison in comparisons} >= {0, 4}
    assert max(comparison.worst for comparison in comparisons) < 0.15


def test_nothing_that_is_predicted_was_fitted() -> None:
    costs = read_costs(RECORDED)
    assert costs.verify_tensor_parallel_size == 1
    fitted = {(1, cost.num_requests, cost.num_draft_tokens) for cost in costs.rounds}
    predicted = {
        (
            comparison.setting.verify_tp,
            comparison.setting.num_requests,
            comparison.setting.num_draft_tokens,
        )
        for comparison in _comparisons()
    }
    assert {batch for _, batch, _ in fitted} == {1, 8}
    assert not fitted & predicted


def test_the_recorded_forecast_is_what_the_planner_predicts() -> None:
    recorded = json.loads(RECORDED.read_text())["comparisons"]
    assert [comparison.as_json() for comparison in _comparisons()] == recorded


def test_the_command_takes_the_recorded_costs_and_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--model", str(BUNDLED_MODEL), "--on-cpu", "--exit-layer", "1"]
    words += ["--verify-tp", "2", "--gpus-per-node", "3"]
    words += ["--requests", "4"]
    words += ["--costs", str(RECORDED), "--links", str(RECORDED), "--context", "60", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = (
        comparison
        for comparison in _comparisons()
        if (
            comparison.setting.verify_tp,
            comparison.setting.num_requests,
            comparison.setting.num_draft_tokens,
        )
        == (2, 4, 4)
    )
    assert report["draft_vocab_size"] == read_costs(RECORDED).model.draft_vocab_size
    assert "at the measured acceptance of" in report["verdict"]
    length = report["lengths"][4]
    assert length["round_s"] == pytest.approx(row.predicted_s, rel=0.01)
    assert length["tokens_per_s"] == pytest.approx(row.predicted_rate, rel=0.01)
    # Two processes on these cores spend more on their sums than they save: said plainly.
    assert report["plain"][0]["num_ranks"] == 1
