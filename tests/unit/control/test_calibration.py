"""Calibration: fitting, its error, its file."""

import math
from pathlib import Path
from random import Random

import pytest

from eesd_dist.control.calibrator import (
    CALIBRATION_FILE,
    Calibrator,
    expected_calibration_error,
    judged_tokens,
    reliability_table,
)
from eesd_dist.control.fitting import fit_calibrator
from eesd_dist.errors import CheckpointError
from eesd_dist.types import Evidence
from tests.unit.control.worlds import evidence, outcome

Judged = list[tuple[Evidence, bool]]


def _overconfident(rng: Random, count: int) -> Judged:
    """A head whose logits are three times too sharp, and worse with depth."""
    judged = []
    for _ in range(count):
        score, depth = rng.gauss(1.0, 1.5), rng.randrange(8)
        truth = 1.0 / (1.0 + math.exp(-(score - 0.15 * depth)))
        claimed = 1.0 / (1.0 + math.exp(-3.0 * score))
        judged.append((evidence(claimed, depth=depth), rng.random() < truth))
    return judged


def _forecasts(calibrator: Calibrator, judged: Judged) -> list[tuple[float, bool]]:
    return [(calibrator.probability(seen), accepted) for seen, accepted in judged]


def test_fitting_removes_most_of_the_calibration_error() -> None:
    rng = Random(8)
    fitted = fit_calibrator(_overconfident(rng, 4_000))
    unseen = _overconfident(rng, 4_000)
    before = expected_calibration_error(_forecasts(Calibrator(), unseen))
    after = expected_calibration_error(_forecasts(fitted, unseen))
    assert before > 0.08
    assert after < 0.03


def test_a_handful_of_tokens_changes_little_and_one_sided_ones_do_not_run_away() -> None:
    few = fit_calibrator([(evidence(0.7), True)] * 3)
    assert few.probability(evidence(0.7)) < 0.9
    many = fit_calibrator([(evidence(0.7), True)] * 5_000)
    assert all(math.isfinite(weight) for weight in many.weights)
    assert many.probability(evidence(0.7)) > 0.95


def test_with_nothing_to_learn_from_the_exit_head_is_believed() -> None:
    assert fit_calibrator([]) == Calibrator()
    assert Calibrator().probability(evidence(0.42)) == pytest.approx(0.42)
    assert 0.0 < Calibrator().probability(evidence(0.0)) < 0.01
    assert 0.99 < Calibrator().probability(evidence(1.0)) < 1.0


def test_tokens_never_judged_are_left_out() -> None:
    seen = [evidence(0.1 * i, depth=i) for i in range(4)]
    judged = judged_tokens([outcome(4, 1, seen), outcome(2, 2, seen[:2])])
    assert judged == [
        (seen[0], True),
        (seen[1], False),
        (seen[0], True),
        (seen[1], True),
    ]


def test_the_reliability_table_counts_every_token_once() -> None:
    forecasts = [(0.05, False), (0.05, False), (0.95, True), (1.0, True)]
    table = reliability_table(forecasts)
    assert [(row.num_judged, row.accepted_share) for row in table] == [(2, 0.0), (2, 1.0)]
    assert expected_calibration_error(forecasts) == pytest.approx((2 * 0.05 + 2 * 0.025) / 4)
    assert expected_calibration_error([]) == 0.0


def test_a_calibrator_survives_its_file(tmp_path: Path) -> None:
    fitted = fit_calibrator(_overconfident(Random(1), 200))
    fitted.save(tmp_path)
    assert Calibrator.load(tmp_path) == fitted


def test_a_head_without_a_calibration_file_gets_the_default(tmp_path: Path) -> None:
    assert Calibrator.load(tmp_path) == Calibrator()


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 2}', '{"version": 1, "bias": 0}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        Calibrator.load(tmp_path)
