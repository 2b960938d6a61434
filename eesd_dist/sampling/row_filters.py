"""Filters of rows as numbers, for kernels that choose a token in one call.

Kernels keep the tokens that `filters.filtered` keeps: its masses are integers, so that neither a
sum's order nor the way to find an edge decides.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eesd_dist.types import ChoiceParams

NO_FILTER = (0, 1.0, -math.inf)


# Shapes: S rows.
class RowFilters(NamedTuple):
    """Filters by row; none where a number keeps all tokens."""

    top_k_S: npt.NDArray[np.int32]
    """0: none."""
    top_p_S: npt.NDArray[np.float64]
    """1: none."""
    log_min_p_S: npt.NDArray[np.float32]
    """Logarithm of min_p; -inf: none."""

    @classmethod
    def none(cls, count: int) -> "RowFilters":
        """Returns filters of so many rows, to be filled."""
        top_k, top_p, log_min_p = NO_FILTER
        return cls(
            np.full(count, top_k, np.int32),
            np.full(count, top_p, np.float64),
            np.full(count, log_min_p, np.float32),
        )

    def fill(self, rows: slice, params: ChoiceParams) -> None:
        """Sets the filters of these rows, which have none yet."""
        if params.is_filtered:
            top_k, top_p, log_min_p = filter_of(params)
            self.top_k_S[rows], self.top_p_S[rows], self.log_min_p_S[rows] = (
                top_k, top_p, log_min_p,
            )  # fmt: skip


def filters_by_row(numbers: Sequence[tuple[int, float, float]]) -> RowFilters | None:
    """Returns rows of `filter_of`; None if none of them is filtered."""
    if all(row_numbers == NO_FILTER for row_numbers in numbers):
        return None
    filters = RowFilters.none(len(numbers))
    filters.top_k_S[:], filters.top_p_S[:], filters.log_min_p_S[:] = zip(*numbers, strict=True)
    return filters


def filter_of(params: ChoiceParams) -> tuple[int, float, float]:
    """Returns top_k, top_p and the logarithm of min_p, as `RowFilters` has them."""
    if not params.is_filtered:
        return NO_FILTER
    # The logarithm on the host: libraries of devices round it differently.
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return max(params.top_k, 0), min(params.top_p, 1.0), log_min_p
