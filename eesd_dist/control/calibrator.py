"""How likely is this very token to be accepted, from what the exit head says of it.

A `Calibrator` is a logistic regression with five weights, small enough to be computed for every
drafted token. It decides a probability; it refuses to know what is done with it and how it was
fitted (`fitting`). It lives in `calibration.json` in the exit head's folder.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import CheckpointError
from eesd_dist.types import Evidence, Outcome

CALIBRATION_FILE = "calibration.json"
FEATURES = ("logit_top1", "margin", "entropy", "depth", "bias")
_EDGE = 1e-3
"""Nothing is certain: probabilities stay within [_EDGE, 1 - _EDGE]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrator:
    """P(accepted) = sigmoid(weights . features); the default believes the exit head's own top-1."""

    logit_top1: float = 1.0
    """Weight of log(p / (1 - p)), p the top-1 probability: the inverse of a temperature."""
    margin: float = 0.0
    entropy: float = 0.0
    depth: float = 0.0
    bias: float = 0.0
    num_judged: int = 0
    """How many judged tokens it was fitted on; 0 when nobody has fitted one."""

    def probability(self, evidence: Evidence) -> float:
        score = (
            self.logit_top1 * logit(evidence.top1_prob)
            + self.margin * evidence.top2_margin
            + self.entropy * evidence.entropy
            + self.depth * evidence.depth
            + self.bias
        )
        return _inside(1.0 / (1.0 + math.exp(-max(min(score, 30.0), -30.0))))

    @property
    def weights(self) -> tuple[float, ...]:
        """In the order of FEATURES."""
        return (self.logit_top1, self.margin, self.entropy, self.depth, self.bias)

    def save(self, folder: Path) -> Path:
        file = folder / CALIBRATION_FILE
        content = dict(zip(FEATURES, self.weights, strict=True)) | {"num_judged": self.num_judged}
        file.write_text(json.dumps({"version": 1} | content, indent=2) + "\n")
        return file

    @staticmethod
    def load(folder: Path) -> "Calibrator":
        """The head's own calibrator, or the default one when its folder has none."""
        file = folder / CALIBRATION_FILE
        if not file.exists():
            return Calibrator()
        return _parse(file)


def features(evidence: Evidence) -> tuple[float, ...]:
    """In the order of FEATURES."""
    return (
        logit(evidence.top1_prob),
        evidence.top2_margin,
        evidence.entropy,
        float(evidence.depth),
        1.0,
    )


def logit(probability: float) -> float:
    p = _inside(probability)
    return math.log(p / (1.0 - p))


def judged_tokens(outcomes: Iterable[Outcome]) -> list[tuple[Evidence, bool]]:
    """What the verifier said of each token it judged; tokens after a rejection are left out."""
    return [
        (evidence, position < outcome.num_accepted)
        for outcome in outcomes
        for position, evidence in enumerate(outcome.evidence[: outcome.num_accepted + 1])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Forecasts of one range beside what came true."""

    low: float
    high: float
    num_judged: int
    mean_forecast: float
    accepted_share: float


def reliability_table(
    forecasts: Sequence[tuple[float, bool]], *, bins: int = 10
) -> tuple[ReliabilityBin, ...]:
    """Equal ranges of forecast probability, empty ones left out."""
    groups: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for forecast, accepted in forecasts:
        groups[min(int(forecast * bins), bins - 1)].append((forecast, accepted))
    return tuple(
        ReliabilityBin(
            low=index / bins,
            high=(index + 1) / bins,
            num_judged=len(group),
            mean_forecast=sum(forecast for forecast, _ in group) / len(group),
            accepted_share=sum(accepted for _, accepted in group) / len(group),
        )
        for index, group in enumerate(groups)
        if group
    )


def expected_calibration_error(forecasts: Sequence[tuple[float, bool]], *, bins: int = 10) -> float:
    """Mean distance between forecast and what came true, over bins weighted by their tokens."""
    if not forecasts:
        return 0.0
    table = reliability_table(forecasts, bins=bins)
    off = sum(row.num_judged * abs(row.mean_forecast - row.accepted_share) for row in table)
    return off / len(forecasts)


def _inside(probability: float) -> float:
    if not probability > _EDGE:  # also where a broken head says nan
        return _EDGE
    return min(probability, 1.0 - _EDGE)


def _parse(file: Path) -> Calibrator:
    try:
        data = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(file=file, found=str(error), expected="JSON") from error
    expected = "version 1 with a finite number for each of " + ", ".join(FEATURES)
    if not isinstance(data, dict) or data.get("version") != 1:
        raise CheckpointError(file=file, found=str(data)[:80], expected=expected)
    numbers = {name: x for name, x in data.items() if isinstance(x, int | float)}
    if not all(math.isfinite(numbers.get(name, math.nan)) for name in FEATURES):
        raise CheckpointError(file=file, found=str(data)[:80], expected=expected)
    weights = {name: float(numbers[name]) for name in FEATURES}
    return Calibrator(**weights, num_judged=int(numbers.get("num_judged", 0)))
