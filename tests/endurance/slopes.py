"""Slopes of samples over time, with confidence intervals that allow for correlated noise.

Memory and counts of a process wander: neighbouring samples say nearly the same, and an ordinary
least-squares interval is several times too narrow. Three steps account for that:

1. Samples become means of blocks of equal length, which removes noise shorter than a block.
2. Every life (one process, or one set of processes) has an intercept of its own, and all share one
   slope: a replaced process starts at another level, and that step is no growth.
3. What is left is taken as first-order autoregressive. Its correlation r between neighbouring
   blocks, corrected for the downward bias of short series, widens the standard error by
   sqrt((1 + r) / (1 - r)) and lowers the degrees of freedom as much.

Knows neither processes nor Ray.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

_HOUR_S = 3600.0
_MAX_CORRELATION = 0.95
_MIN_FREEDOM = 2.0
"""Degrees of freedom of the interval of a strongly correlated series."""
_ONE_SIDED_97_5 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading of a figure."""

    at_s: float
    life: Hashable
    """What kept running between two samples; the value may jump from one life to the next."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Growth in an hour, with its 95 % confidence interval."""

    per_h: float
    low_per_h: float
    high_per_h: float
    num_blocks: int
    correlation: float
    """Between neighbouring blocks."""

    def is_below(self, limit_per_h: float) -> bool:
        """Whether the interval contains zero, or lies below the limit."""
        return self.low_per_h <= 0.0 or self.high_per_h < limit_per_h


@dataclass(frozen=True, slots=True)
class _Block:
    at_s: float
    value: float


def slope_of(samples: Iterable[Sample], *, block_s: float) -> Slope | None:
    """Returns the slope that all lives have in common; None with too few blocks to tell.

    A life counts from its third block on: two blocks have a slope, but no noise to judge it by.
    """
    lives = [life for life in _blocks(samples, block_s) if len(life) >= 3]
    num_blocks = sum(map(len, lives))
    freedom = num_blocks - len(lives) - 1
    if freedom < _MIN_FREEDOM:
        return None
    centred = [_centred(life) for life in lives]
    spread = sum(block.at_s**2 for life in centred for block in life)
    rate = sum(block.at_s * block.value for life in centred for block in life) / spread
    left = [[block.value - rate * block.at_s for block in life] for life in centred]
    correlation = _correlation(left)
    widening = (1.0 + correlation) / (1.0 - correlation)
    variance = sum(value**2 for life in left for value in life) / freedom
    half = _t_quantile(max(_MIN_FREEDOM, freedom / widening)) * math.sqrt(
        widening * variance / spread
    )
    return Slope(
        per_h=rate * _HOUR_S,
        low_per_h=(rate - half) * _HOUR_S,
        high_per_h=(rate + half) * _HOUR_S,
        num_blocks=num_blocks,
        correlation=correlation,
    )


def _blocks(samples: Iterable[Sample], block_s: float) -> list[list[_Block]]:
    """Returns the means of each life's blocks, in order."""
    readings: defaultdict[Hashable, defaultdict[int, list[Sample]]]
    readings = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        readings[sample.life][math.floor(sample.at_s / block_s)].append(sample)
    return [
        [
            _Block(_mean([s.at_s for s in block]), _mean([s.value for s in block]))
            for _, block in sorted(blocks.items())
        ]
        for blocks in readings.values()
    ]


def _centred(life: Sequence[_Block]) -> list[_Block]:
    at_s, value = _mean([b.at_s for b in life]), _mean([b.value for b in life])
    return [_Block(block.at_s - at_s, block.value - value) for block in life]


def _correlation(lives: Sequence[Sequence[float]]) -> float:
    """Returns the correlation between neighbours, at least 0.

    Residuals of a fitted line are less correlated than the noise, by (2 + 4 r) / n for a series of
    n (Kendall's bias, for a fitted trend).
    """
    total = sum(value**2 for life in lives for value in life)
    if total == 0.0:
        return 0.0
    correlation = sum(a * b for life in lives for a, b in pairwise(life)) / total
    num = sum(map(len, lives)) / len(lives)
    corrected = (num * correlation + 2.0) / (num - 4.0) if num > 6.0 else _MAX_CORRELATION
    return min(max(corrected, 0.0), _MAX_CORRELATION)


def _t_quantile(freedom: float) -> float:
    """Returns Student's t at 97.5 % (Hill 1970, the asymptotic series; within 1 % from 2 on)."""
    z = _ONE_SIDED_97_5
    terms = (
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0,
        (79.0 * z**9 + 776.0 * z**7 + 1482.0 * z**5 - 1920.0 * z**3 - 945.0 * z) / 92160.0,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
