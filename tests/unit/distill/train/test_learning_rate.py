"""The learning rate by step, and a time budget converted to steps."""

import pytest

from eesd_dist.distill.train.learning_rate import LearningRate, Pace


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    rate = LearningRate(peak=1.0, warmup_steps=10, total_steps=110)
    assert [rate.at(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate.at(10) == pytest.approx(1.0)
    assert rate.at(60) == pytest.approx((1.0 + 0.03) / 2)
    assert rate.at(110) == pytest.approx(0.03)
    assert all(rate.at(step) >= rate.at(step + 1) for step in range(10, 110))


def test_the_warm_up_does_not_depend_on_when_the_run_ends() -> None:
    bounded, unbounded = (
        LearningRate(peak=2.0, warmup_steps=20, total_steps=total) for total in (500, None)
    )
    assert [bounded.at(step) for step in range(20)] == [unbounded.at(step) for step in range(20)]
    with pytest.raises(AssertionError, match="end is not known"):
        unbounded.at(20)


def test_a_run_no_longer_than_its_warm_up_has_a_rate_at_every_step() -> None:
    rate = LearningRate(peak=1.0, warmup_steps=5, total_steps=5)
    assert rate.at(4) == 1.0
    assert rate.at(5) == 1.0


def test_a_budget_buys_steps_and_the_evaluations_between_them() -> None:
    pace = Pace(step_s=0.5, evaluation_s=10.0)
    assert (
        pace.steps_within(60.0, evaluation_period=100) == 100
    )  # 50 s of steps, 10 s of evaluation
    assert pace.steps_within(-1.0, evaluation_period=100) == 0
