"""Estimates the probability that a drafted token is accepted, from the exit head's evidence.

A `Calibrator` is a logistic regression with eight weights, small enough to be computed for every
drafted token, followed by an isotonic curve that corrects what the regression cannot fit. Does not
depend on how it was fitted (`fitting`) or how the probability is used. It is stored in
`calibration.json` in the exit head's folder.

The evidence is what the choice of the draft has found anyway: the gap between the two best scores,
noise included, the depth and the temperature. On 52 thousand judged tokens of the bundled model,
each forecast without its own prompt, the log-loss is 0.506. Six features, with the head's top-1
probability, margin and entropy but without the temperature, took a pass over the logits, had 0.511
and missed by 0.11 at temperature 0 (0.02 here). A head without a file gets `UNFITTED`: a gap in
logits means much the same for any head, and what it does not is learnt from verdicts.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from eesd_dist.control.chain_rule import Doubles, LogOdds
from eesd_dist.errors import CheckpointError
from eesd_dist.types import Evidence, Outcome

CALIBRATION_FILE = "calibration.json"
FEATURES = (
    "log_gap",
    "log_gap_squared",
    "depth",
    "temperature",
    "temperature_log_gap",
    "greedy",
    "greedy_log_gap",
    "bias",
)
_VERSION = 3
_EDGE = 1e-3
"""Probabilities are limited to [_EDGE, 1 - _EDGE]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrator:
    """P(accepted) = curve(sigmoid(weights . features)); the default is the exit head's top-1
    probability."""

    log_gap: float = 0.0
    """Weight of log(1 + gap)."""
    log_gap_squared: float = 0.0
    depth: float = 0.0
    temperature: float = 0.0
    temperature_log_gap: float = 0.0
    greedy: float = 0.0
    """Weight of 1 at temperature 0, where the gap is one of plain logits."""
    greedy_log_gap: float = 0.0
    bias: float = 0.0
    logit_top1: float = 1.0
    """Weight of log(p / (1 - p)), p the top-1 probability; 0 in every fit."""
    curve: tuple[tuple[float, float], ...] = ()
    """Pairs of a forecast of the sigmoid and the accepted share at it, both ascending; linear
    between them. Empty: the forecast is not changed."""
    num_judged: int = 0
    """Number of judged tokens it was fitted on; 0 if it was not fitted."""

    @property
    def needs_probs(self) -> bool:
        """True if it reads `Evidence.top1_prob`."""
        return self.logit_top1 != 0.0

    def probability(self, evidence: Evidence) -> float:
        log_gap = math.log1p(max(evidence.gap, 0.0))
        temperature = evidence.temperature
        slope = self.log_gap + self.log_gap_squared * log_gap
        score = self.depth * evidence.depth + self.bias
        if temperature == 0.0:
            slope += self.greedy_log_gap
            score += self.greedy
        else:
            slope += self.temperature_log_gap * temperature
            score += self.temperature * temperature
        score += slope * log_gap
        if self.logit_top1:
            score += self.logit_top1 * logit(evidence.top1_prob)
        return self.straightened(1.0 / (1.0 + math.exp(-max(min(score, 30.0), -30.0))))

    def at_temperature(self, temperature: float) -> "LogOdds":
        """Returns the log-odds at one temperature, of a calibrator that does not read top-1
        probabilities."""
        assert not self.needs_probs
        is_greedy = temperature == 0.0
        return LogOdds(
            bias=self.bias + (self.greedy if is_greedy else self.temperature * temperature),
            depth=self.depth,
            slope=self.log_gap
            + (self.greedy_log_gap if is_greedy else self.temperature_log_gap * temperature),
            slope_of_slope=self.log_gap_squared,
            curve=_array(self.curve),
        )

    def straightened(self, forecast: float) -> float:
        """Returns the curve's value at a forecast of the sigmoid."""
        if not self.curve:
            return _inside(forecast)
        right = bisect_right(self.curve, (forecast, 2.0))
        if right == 0:
            return _inside(self.curve[0][1])
        if right == len(self.curve):
            return _inside(self.curve[-1][1])
        (x0, y0), (x1, y1) = self.curve[right - 1], self.curve[right]
        return _inside(y0 + (y1 - y0) * (forecast - x0) / (x1 - x0))

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights in the order of FEATURES."""
        return tuple(getattr(self, name) for name in FEATURES)

    def save(self, folder: Path) -> Path:
        file = folder / CALIBRATION_FILE
        content = dict(zip(FEATURES, self.weights, strict=True)) | {
            "curve": [list(point) for point in self.curve],
            "num_judged": self.num_judged,
        }
        file.write_text(json.dumps({"version": _VERSION} | content, indent=2) + "\n")
        return file

    @staticmethod
    def load(folder: Path) -> "Calibrator":
        """Returns the calibrator in the head's folder, or `UNFITTED` if there is none."""
        file = folder / CALIBRATION_FILE
        if not file.exists():
            return UNFITTED
        return _parse(file)


@cache
def _array(curve: tuple[tuple[float, float], ...]) -> Doubles:
    return np.array(curve, np.float64).reshape(-1, 2)


UNFITTED = Calibrator(
    log_gap=-0.2,
    log_gap_squared=0.6,
    temperature=-0.4,
    temperature_log_gap=1.4,
    greedy=-0.4,
    greedy_log_gap=2.4,
    bias=-0.6,
    logit_top1=0.0,
)
"""Calibrator without data: the weights of the bundled head, rounded, and the prior of every fit."""


def features(evidence: Evidence) -> tuple[float, ...]:
    """Returns the features in the order of FEATURES."""
    log_gap = math.log1p(max(evidence.gap, 0.0))
    temperature, is_greedy = evidence.temperature, evidence.temperature == 0.0
    return (
        log_gap,
        log_gap * log_gap,
        float(evidence.depth),
        temperature,
        temperature * log_gap,
        float(is_greedy),
        is_greedy * log_gap,
        1.0,
    )


def logit(probability: float) -> float:
    p = _inside(probability)
    return math.log(p / (1.0 - p))


def judged_tokens(outcomes: Iterable[Outcome]) -> list[tuple[Evidence, bool]]:
    """Returns evidence and verdict of every first choice that was judged."""
    return [judged for outcome in outcomes for judged in _judged(outcome)]


def _judged(outcome: Outcome) -> Iterator[tuple[Evidence, bool]]:
    for branch in outcome.branches:
        yield branch.evidence, branch.chosen_rank == 0
    for position, evidence in enumerate(outcome.evidence[: outcome.num_accepted + 1]):
        yield evidence, position < outcome.num_accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Forecasts of one range, and the accepted share."""

    low: float
    high: float
    num_judged: int
    mean_forecast: float
    accepted_share: float


def reliability_table(
    forecasts: Sequence[tuple[float, bool]], *, bins: int = 10
) -> tuple[ReliabilityBin, ...]:
    """Returns bins of equal ranges of forecast probability, without empty ones."""
    groups: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for forecast, accepted in forecasts:
        groups[min(int(forecast * bins), bins - 1)].append((forecast, accepted))
    return tuple(
        _bin_of(group, low=index / bins, high=(index + 1) / bins)
        for index, group in enumerate(groups)
        if group
    )


def expected_calibration_error(forecasts: Sequence[tuple[float, bool]], *, bins: int = 10) -> float:
    """Returns the mean distance of forecast and accepted share, over bins weighted by tokens."""
    if not forecasts:
        return 0.0
    return _error_of(reliability_table(forecasts, bins=bins))


def equal_mass_table(
    forecasts: Sequence[tuple[float, bool]], *, bins: int = 10
) -> tuple[ReliabilityBin, ...]:
    """Returns bins with equal numbers of tokens, up to a difference of one."""
    ranked = sorted(forecasts, key=lambda pair: pair[0])  # stable for equal forecasts
    edges = [len(ranked) * index // bins for index in range(bins + 1)]
    return tuple(
        _bin_of(ranked[low:high], low=ranked[low][0], high=ranked[high - 1][0])
        for low, high in pairwise(edges)
        if high > low
    )


def equal_mass_calibration_error(
    forecasts: Sequence[tuple[float, bool]], *, bins: int = 10
) -> float:
    """Returns the calibration error over bins with equal numbers of tokens."""
    if not forecasts:
        return 0.0
    return _error_of(equal_mass_table(forecasts, bins=bins))


def _error_of(table: Sequence[ReliabilityBin]) -> float:
    off = sum(row.num_judged * abs(row.mean_forecast - row.accepted_share) for row in table)
    return off / sum(row.num_judged for row in table)


def _bin_of(group: Sequence[tuple[float, bool]], *, low: float, high: float) -> ReliabilityBin:
    return ReliabilityBin(
        low=low,
        high=high,
        num_judged=len(group),
        mean_forecast=sum(forecast for forecast, _ in group) / len(group),
        accepted_share=sum(accepted for _, accepted in group) / len(group),
    )


def _inside(probability: float) -> float:
    if not probability > _EDGE:  # also for nan, from a broken head
        return _EDGE
    return min(probability, 1.0 - _EDGE)


def _parse(file: Path) -> Calibrator:
    try:
        data = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(file=file, found=str(error), expected="JSON") from error
    expected = f"version {_VERSION} with a finite number for each of {', '.join(FEATURES)}"
    numbers = (
        {name: x for name, x in data.items() if isinstance(x, int | float)}
        if isinstance(data, dict)
        else {}
    )
    is_whole = all(math.isfinite(numbers.get(name, math.nan)) for name in FEATURES)
    if numbers.get("version") != _VERSION or not is_whole:
        raise CheckpointError(
            file=file,
            found=str(data)[:80],
            expected=expected,
            advice="calibrate the head again with `eesd distill calibrate`",
        )
    return Calibrator(
        **{name: float(numbers[name]) for name in FEATURES},
        logit_top1=0.0,
        curve=_curve(file, data.get("curve", [])),
        num_judged=int(numbers.get("num_judged", 0)),
    )


def _curve(file: Path, points: object) -> tuple[tuple[float, float], ...]:
    expected = "a curve of pairs of probabilities, forecasts rising and shares not falling"
    try:
        curve = tuple((float(x), float(y)) for x, y in points)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise CheckpointError(file=file, found=str(points)[:80], expected=expected) from error
    rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(curve))
    if not rises or not all(0.0 <= x <= 1.0 and 0.0 <= y <= 1.0 for x, y in curve):
        raise CheckpointError(file=file, found=str(points)[:80], expected=expected)
    return curve
