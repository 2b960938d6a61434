"""One percentile and one bootstrap for all figures."""

import math
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from eesd_dist.statistics import Rows, bootstrap, percentile, usual_s

Floats = NDArray[np.float64]


def test_a_percentile_is_the_smallest_value_that_enough_others_do_not_exceed() -> None:
    rng = Random(1)
    for size in range(1, 60):
        values = [round(rng.random(), 3) for _ in range(size)]
        for share in (0.25, 0.5, 0.95, 1.0):
            enough = [v for v in values if sum(o <= v for o in values) >= share * size]
            assert percentile(values, share) == min(enough)


def test_infinite_times_have_percentiles() -> None:
    assert percentile([math.inf, 1.0, 2.0, math.inf], 0.5) == 2.0
    assert percentile([math.inf, 1.0, math.inf], 0.5) == math.inf


@pytest.mark.parametrize("disturbed_s", [2.0, 1e6])
def test_disturbances_of_half_the_runs_do_not_change_the_usual_time(disturbed_s: float) -> None:
    assert usual_s([1.0, disturbed_s] * 10) == 1.0
    assert usual_s([0.25]) == 0.25


def test_nine_in_ten_intervals_contain_the_mean() -> None:
    rng = np.random.default_rng(3)
    num_containing = 0
    for _ in range(200):
        values = rng.normal(size=40)

        def mean(rows_of: list[Rows]) -> Floats:
            return np.asarray(values[rows_of[0]].mean(axis=-1))  # noqa: B023

        interval = bootstrap(mean, [40], share=0.9, draws=300)
        num_containing += interval.low <= 0.0 <= interval.high
    assert 165 <= num_containing <= 192


def test_groups_are_drawn_apart_and_equal_arguments_give_equal_intervals() -> None:
    low, high = np.zeros(5), np.ones(7)

    def sum_of_means(rows_of: list[Rows]) -> Floats:
        assert [rows.shape[-1] for rows in rows_of] == [5, 7]
        return np.asarray(low[rows_of[0]].mean(axis=-1) + high[rows_of[1]].mean(axis=-1))

    interval = bootstrap(sum_of_means, [5, 7])
    assert (interval.low, interval.high) == (1.0, 1.0)
    values = np.arange(9.0)

    def mean(rows_of: list[Rows]) -> Floats:
        return np.asarray(values[rows_of[0]].mean(axis=-1))

    assert bootstrap(mean, [9]) == bootstrap(mean, [9])
    assert bootstrap(mean, [9]) != bootstrap(mean, [9], seed=1)
