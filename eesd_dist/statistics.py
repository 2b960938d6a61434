"""Statistics of all figures: one percentile and one bootstrap, so that figures can be compared.

Depends on numbers only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
"""Indices of measurements of one group, with repetitions; the last axis is one resample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the nearest rank: the smallest value that a share of the values does not exceed.

    A measured value always, so that infinite times have a percentile too.
    """
    ascending = np.sort(np.asarray(values, dtype=np.float64))
    return float(ascending[max(0, math.ceil(share * len(ascending)) - 1)])


def usual_s(times: Sequence[float]) -> float:
    """Returns the lower quartile: on a shared machine disturbances only make a run longer."""
    return percentile(times, 0.25)


def bootstrap(
    statistic: Callable[[list[Rows]], NDArray[np.float64]],
    sizes: Sequence[int],
    *,
    share: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Returns the percentile bootstrap interval of a statistic (Efron and Tibshirani 1993, chapter
    13).

    Each group of `sizes` measurements is drawn from on its own; `statistic` gets the rows of all
    resamples at once. Equal arguments give equal intervals.
    """
    rng = np.random.default_rng(seed)
    values = statistic([rng.integers(size, size=(draws, size)) for size in sizes]).tolist()
    tail = (1.0 - share) / 2
    return Interval(low=percentile(values, tail), high=percentile(values, 1.0 - tail))
