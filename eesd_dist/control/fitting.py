"""Fits a `Calibrator` to logged verdicts.

Logistic regression by Newton's method with a ridge towards weights of another head, so that ten
judged tokens change little and ten thousand determine the fit. With enough tokens a third is held
out to correct the regression: isotonic regression (Zadrozny and Elkan 2002) over groups of equal
size. A pure function of its pairs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from eesd_dist.control.calibrator import FEATURES, UNFITTED, Calibrator, features
from eesd_dist.types import Evidence


def isotonic(values: Sequence[float]) -> list[float]:
    """Returns the non-decreasing sequence with the least squared distance to `values`: neighbours
    in the wrong order are replaced by their mean, until there are none (pool adjacent violators:
    Ayer et al. 1955; Barlow et al. 1972)."""
    blocks: list[tuple[float, int]] = []  # mean and number of values
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] >= mean:
            left, num_left = blocks.pop()
            mean = (left * num_left + mean * count) / (num_left + count)
            count += num_left
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


Array = npt.NDArray[np.float64]

Judged = Sequence[tuple[Evidence, bool]]

# Shapes: `rows` [judged tokens, features]; every other array has one of these two lengths.

_BLOCK = 64
"""Tokens per held-out block: neighbouring tokens of one text are alike."""
_KNOTS = 20
_FEWEST_FOR_CURVE = 100 * _KNOTS
"""Least number of held-out tokens for a curve; with fewer it would fit noise."""


def fit_calibrator(
    judged: Judged, *, ridge: float = 1.0, max_steps: int = 50, curved: bool = True
) -> Calibrator:
    """Returns the calibrator with the highest penalised likelihood (`judged_tokens` gives the
    pairs, in the order of their rounds). `curved` False fits no isotonic curve."""
    held_back = [pair for i, pair in enumerate(judged) if i // _BLOCK % 3 == 2]
    if not curved or len(held_back) < _FEWEST_FOR_CURVE:
        return _fit_line(judged, ridge=ridge, max_steps=max_steps)
    seen = [pair for i, pair in enumerate(judged) if i // _BLOCK % 3 != 2]
    line = _fit_line(seen, ridge=ridge, max_steps=max_steps)
    return replace(line, curve=_fit_curve(line, held_back), num_judged=len(judged))


def _fit_curve(line: Calibrator, judged: Judged) -> tuple[tuple[float, float], ...]:
    """Returns the accepted share of groups of equal size, made non-decreasing in the forecast."""
    forecast = [(line.probability(evidence), accepted) for evidence, accepted in judged]
    ranked = sorted(forecast, key=lambda pair: pair[0])
    edges = [len(ranked) * index // _KNOTS for index in range(_KNOTS + 1)]
    groups = [ranked[low:high] for low, high in pairwise(edges)]
    forecasts = [sum(forecast for forecast, _ in group) / len(group) for group in groups]
    # Half a token of either kind is added, so that no group has a share of 0 or 1.
    shares = [(sum(accepted for _, accepted in group) + 0.5) / (len(group) + 1) for group in groups]
    return tuple(
        (x, y)
        for index, (x, y) in enumerate(zip(forecasts, isotonic(shares), strict=True))
        if index == 0 or x > forecasts[index - 1]
    )


def _fit_line(judged: Judged, *, ridge: float, max_steps: int) -> Calibrator:
    if not judged:
        return UNFITTED
    start = np.array(UNFITTED.weights)
    rows = np.array([features(evidence) for evidence, _ in judged])
    accepted = np.array([was_accepted for _, was_accepted in judged], dtype=np.float64)
    # In units of each feature's spread, so that one ridge has the same effect on all. A feature
    # that hardly varies (such as the bias) is penalised as if its spread were 1.
    scale = np.maximum(rows.std(axis=0), 1.0)
    penalty = ridge * scale**2
    weights = _newton(rows, accepted, start, penalty, max_steps=max_steps)
    fitted = dict(zip(FEATURES, weights.tolist(), strict=True))
    return Calibrator(**fitted, logit_top1=0.0, num_judged=len(judged))


def _newton(rows: Array, accepted: Array, start: Array, penalty: Array, *, max_steps: int) -> Array:
    weights = start
    loss = _loss(rows, accepted, weights, start, penalty)
    for _ in range(max_steps):
        p = _sigmoid(rows @ weights)
        gradient = rows.T @ (p - accepted) + penalty * (weights - start)
        curvature = (rows * (p * (1.0 - p))[:, None]).T @ rows + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while (new := _loss(rows, accepted, weights - size * step, start, penalty)) > loss:
            size /= 2.0
            if size < 1e-6:
                return weights
        weights, gain, loss = weights - size * step, loss - new, new
        if gain < 1e-9 * (1.0 + abs(loss)):
            break
    return weights


def _loss(rows: Array, accepted: Array, weights: Array, start: Array, penalty: Array) -> float:
    score = rows @ weights
    likelihood = np.sum(np.logaddexp(0.0, score) - accepted * score)
    return float(likelihood + 0.5 * np.sum(penalty * (weights - start) ** 2))


def _sigmoid(score: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(score, -30.0, 30.0))))
