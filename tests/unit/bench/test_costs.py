"""The usual time leaves out what disturbed a run."""

import pytest

from eesd_dist.bench.costs.usual import usual_s


def test_the_usual_time_is_the_lower_quartile_in_any_order() -> None:
    assert usual_s([4.0, 1.0, 3.0, 5.0, 2.0]) == 2.0


@pytest.mark.parametrize("disturbed_s", [2.0, 1e6])
def test_disturbances_of_half_the_runs_change_nothing(disturbed_s: float) -> None:
    assert usual_s([1.0, disturbed_s] * 10) == 1.0


def test_a_single_time_is_the_usual_one() -> None:
    assert usual_s([0.25]) == 0.25
