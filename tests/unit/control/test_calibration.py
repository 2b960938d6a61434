"""Calibration: fitting, its error, its file."""

import json
import math
from pathlib import Path
from random import Random

import pytest
from msgspec import structs

from eesd_dist.control.calibrator import (
    CALIBRATION_FILE,
    FEATURES,
    UNFITTED,
    Calibrator,
    equal_mass_calibration_error,
    equal_mass_table,
    expected_calibration_error,
    features,
    judged_tokens,
    reliability_table,
)
from eesd_dist.control.fitting import fit_calibrator
from eesd_dist.errors import CheckpointError
from eesd_dist.types import Branch, Evidence, Outcome, RequestId
from tests.unit.control.worlds import evidence, outcome

Judged = list[tuple[Evidence, bool]]


def _overconfident(rng: Random, count: int) -> Judged:
    """Draws tokens of a head with logits that are three times too sharp, and worse with depth."""
    judged = []
    for _ in range(count):
        score, depth = rng.gauss(1.0, 1.5), rng.randrange(8)
        truth = 1.0 / (1.0 + math.exp(-(score - 0.15 * depth)))
        claimed = 1.0 / (1.0 + math.exp(-3.0 * score))
        seen = Evidence(depth=depth, top1_prob=claimed, gap=math.expm1(max(score + 3.0, 0.0)))
        judged.append((seen, rng.random() < truth))
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


def _with_gaps(rng: Random, count: int) -> Judged:
    """Draws tokens of a head with uninformative probabilities and informative, steep gaps."""
    judged = []
    for _ in range(count):
        gap = rng.expovariate(1.0)
        truth = min(max(gap, 0.3), 0.95)
        judged.append((Evidence(depth=0, gap=gap), rng.random() < truth))
    return judged


def _log_loss(forecasts: list[tuple[float, bool]]) -> float:
    return -sum(math.log(p if came_true else 1 - p) for p, came_true in forecasts) / len(forecasts)


def test_the_gap_between_the_two_best_scores_is_made_use_of() -> None:
    rng = Random(12)
    judged, unseen = _with_gaps(rng, 3_000), _with_gaps(rng, 3_000)
    blind = fit_calibrator(
        [(structs.replace(seen, gap=0.0), accepted) for seen, accepted in judged]
    )
    seeing = fit_calibrator(judged)
    without = [(structs.replace(seen, gap=0.0), accepted) for seen, accepted in unseen]
    assert _log_loss(_forecasts(seeing, unseen)) < _log_loss(_forecasts(blind, without)) - 0.1


def test_what_a_straight_line_cannot_follow_the_curve_straightens() -> None:
    rng = Random(13)
    judged, unseen = _with_gaps(rng, 9_000), _with_gaps(rng, 9_000)
    straight, curved = fit_calibrator(judged, curved=False), fit_calibrator(judged)
    before = expected_calibration_error(_forecasts(straight, unseen))
    after = expected_calibration_error(_forecasts(curved, unseen))
    assert not straight.curve
    assert before > 0.03 > after
    assert equal_mass_calibration_error(_forecasts(curved, unseen)) < 0.03


def test_forecasts_are_made_of_the_features_that_are_fitted() -> None:
    weights = dict(zip(FEATURES, (-0.3, 0.7, 0.05, -0.4, 1.1, -0.2, 1.9, -0.6), strict=True))
    calibrator = Calibrator(**weights, logit_top1=0.0)
    for gap in (0.0, 0.4, 7.0):
        for temperature in (0.0, 0.3, 1.2):
            seen = Evidence(depth=3, gap=gap, temperature=temperature)
            score = sum(w * x for w, x in zip(calibrator.weights, features(seen), strict=True))
            assert calibrator.probability(seen) == pytest.approx(1.0 / (1.0 + math.exp(-score)))


def test_the_curve_never_falls_and_meets_its_own_points() -> None:
    fitted = fit_calibrator(_overconfident(Random(3), 8_000))
    values = [fitted.straightened(i / 200) for i in range(201)]
    assert values == sorted(values)
    for forecast, share in fitted.curve:
        assert fitted.straightened(forecast) == pytest.approx(min(max(share, 1e-3), 1 - 1e-3))


def test_bins_of_equal_mass_hold_equally_many_tokens() -> None:
    forecasts = [(i / 103, i % 3 == 0) for i in range(103)]
    assert {row.num_judged for row in equal_mass_table(forecasts)} == {10, 11}
    assert sum(row.num_judged for row in equal_mass_table(forecasts)) == 103
    assert equal_mass_calibration_error([]) == 0.0
    constant = [(0.4, i % 5 < 2) for i in range(1_000)]
    assert equal_mass_calibration_error(constant) == pytest.approx(0.0)


def _by_temperature(rng: Random, count: int) -> Judged:
    """Draws tokens where the same gap means more at temperature 0 and less at high ones."""
    judged = []
    for _ in range(count):
        temperature = rng.choice([0.0, 0.5, 1.0])
        gap = rng.expovariate(1.0)
        log_gap = math.log1p(gap)
        score = (4.0 if not temperature else 3.0 - 2.0 * temperature) * log_gap - 1.0
        seen = Evidence(depth=0, gap=gap, temperature=temperature)
        judged.append((seen, rng.random() < 1.0 / (1.0 + math.exp(-score))))
    return judged


def test_a_gap_is_judged_by_its_temperature() -> None:
    rng = Random(21)
    fitted, unseen = fit_calibrator(_by_temperature(rng, 30_000)), _by_temperature(rng, 30_000)
    for temperature in (0.0, 0.5, 1.0):
        some = [pair for pair in unseen if pair[0].temperature == temperature]
        assert expected_calibration_error(_forecasts(fitted, some)) < 0.03
        assert fitted.needs_probs is False


def test_a_handful_of_tokens_changes_little_and_one_sided_ones_do_not_run_away() -> None:
    seen = Evidence(depth=0, gap=1.0, temperature=0.7)
    before = fit_calibrator([(seen, True), (seen, False)]).probability(seen)
    assert 0.4 < before < 0.8
    assert abs(fit_calibrator([(seen, True)] * 3).probability(seen) - before) < 0.35
    many = fit_calibrator([(seen, True)] * 5_000)
    assert all(math.isfinite(weight) for weight in many.weights)
    assert many.probability(seen) > 0.95


def test_with_nothing_to_learn_from_the_fit_is_its_prior() -> None:
    assert fit_calibrator([]) == UNFITTED


def test_the_heads_own_probability_is_a_forecast_within_its_bounds() -> None:
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
    for count in (200, 7_000):
        fitted = fit_calibrator(_overconfident(Random(1), count))
        assert bool(fitted.curve) is (count == 7_000)
        fitted.save(tmp_path)
        assert Calibrator.load(tmp_path) == fitted


def test_a_head_without_a_calibration_file_gets_that_of_the_bundled_one(tmp_path: Path) -> None:
    assert Calibrator.load(tmp_path) == UNFITTED


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"version": 3}', '{"version": 2}', '{"version": 4, "bias": 0}']
)
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        Calibrator.load(tmp_path)


@pytest.mark.parametrize("curve", [3, [[0.1]], [[0.2, 0.5], [0.1, 0.6]], [[0.1, 0.5], [0.2, 0.4]]])
def test_a_curve_that_is_none_is_refused(tmp_path: Path, curve: object) -> None:
    content = dict.fromkeys(FEATURES, 0.0) | {"version": 3, "curve": curve}
    (tmp_path / CALIBRATION_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="curve"):
        Calibrator.load(tmp_path)


def test_verdicts_on_trees_are_judged_tokens_too() -> None:
    sure, unsure = evidence(0.9), evidence(0.4, depth=1)
    verdict = Outcome(
        request_id=RequestId("tree"),
        num_drafted=5,
        num_accepted=1,
        branches=(
            Branch(depth=0, num_offered=2, chosen_rank=1, evidence=sure),
            Branch(depth=1, num_offered=2, chosen_rank=0, evidence=unsure),
        ),
    )
    assert judged_tokens([verdict]) == [(sure, False), (unsure, True)]
