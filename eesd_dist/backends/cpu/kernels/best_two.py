"""The two best tokens after rows of logits on a CPU, in one compiled call."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from eesd_dist.backends.cpu.compiled import kernel
from eesd_dist.backends.cpu.kernels.choice import (
    Floats,
    Ints,
    gumbel_rows,
    score_row,
    two_largest,
)
from eesd_dist.backends.cpu.kernels.filters import NUM_BINS, filter_row, has_filter, scaled
from eesd_dist.sampling import row_filters
from eesd_dist.sampling.row_filters import RowFilters


# Shapes: S rows, V columns.
def _best_two(
    logits_SV: Floats,
    divisors_S: Floats,
    words_S3: npt.NDArray[np.uint32],
    ids_V: Ints,
    filters: RowFilters,
    best_S2: npt.NDArray[np.int64],
    values_S2: Floats,
) -> None:
    count = len(ids_V)
    scores_V, lost_V = np.empty(count, np.float32), np.empty(count, np.float32)
    keys_V, mantissas_V = np.empty(count, np.int32), np.empty(count, np.int32)
    scaled_V = np.empty(count, np.float32)
    masses_N, counts_N = np.empty(NUM_BINS, np.int64), np.empty(NUM_BINS, np.int64)
    for row in range(len(logits_SV)):
        score_row(
            logits_SV[row],
            divisors_S[row],
            words_S3[row],
            ids_V,
            scores_V,
            lost_V,
            keys_V,
            mantissas_V,
        )
        if has_filter(filters, row):
            for v in range(count):
                scaled_V[v] = scaled(logits_SV[row, v], divisors_S[row])
            filter_row(
                scaled_V,
                filters,
                row,
                masses_N,
                counts_N,
                lost_V,
                mantissas_V,
                scores_V,
                keys_V,
            )
        first, second = two_largest(keys_V)
        best_S2[row, 0], best_S2[row, 1] = first, second
        values_S2[row, 0], values_S2[row, 1] = scores_V[first], scores_V[second]


def best_two(
    logits_SV: Floats,
    divisors: Sequence[float],
    words_S3: npt.NDArray[np.int32],
    ids_V: Ints,
    filters: RowFilters | None,
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Returns the columns and scores [S, 2] of each row's best two, of equal ones the first.

    `divisors`: temperatures, 0 for a row without noise; such rows have no filters.
    """
    best_S2 = np.empty((len(logits_SV), 2), np.int64)
    values_S2 = np.empty((len(logits_SV), 2), np.float32)
    best_two_kernel()(
        logits_SV,
        np.array(divisors, np.float32),
        np.ascontiguousarray(words_S3).view(np.uint32),
        ids_V,
        RowFilters.none(len(logits_SV)) if filters is None else filters,
        best_S2,
        values_S2,
    )
    return best_S2, values_S2


@cache
def best_two_kernel() -> Callable[..., None]:
    return kernel(_best_two, row_filters)


def warm_up() -> None:
    """Compiles noise and choice or loads them, so that no request waits for it."""
    words_S3, ids_V = np.zeros((1, 3), np.int32), np.arange(2, dtype=np.int32)
    gumbel_rows(words_S3, ids_V)
    best_two(np.zeros((1, 2), np.float32), [1.0], words_S3, ids_V, None)
