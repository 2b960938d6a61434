"""The nearest non-decreasing sequence, compared with every sequence on a grid."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.control.fitting import isotonic

GRID = [i / 4 for i in range(9)]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(GRID), min_size=1, max_size=4))
def test_no_row_that_never_falls_is_nearer(values: list[float]) -> None:
    fitted = isotonic(values)
    assert fitted == sorted(fitted)

    def distance(row: tuple[float, ...] | list[float]) -> float:
        return sum((x - v) ** 2 for x, v in zip(row, values, strict=True))

    best = min(map(distance, combinations_with_replacement(GRID, len(values))))
    assert distance(fitted) <= best + 1e-12


def test_a_row_that_rises_is_left_as_it_is_and_a_falling_one_becomes_its_mean() -> None:
    assert isotonic([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0]
    assert isotonic([4.0, 2.0, 0.0]) == pytest.approx([2.0] * 3)
    assert isotonic([]) == []
