"""Fitting a `Calibrator` to logged verdicts.

Logistic regression by Newton's method with a ridge that pulls towards the default calibrator, so
that ten judged tokens change little and ten thousand decide. A pure function of its pairs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eesd_dist.control.calibrator import FEATURES, Calibrator, features
from eesd_dist.types import Evidence

Array = npt.NDArray[np.float64]

# rows: [judged tokens, features]; every other array has one of the two lengths.


def fit_calibrator(
    judged: Sequence[tuple[Evidence, bool]], *, ridge: float = 1.0, max_steps: int = 50
) -> Calibrator:
    """The calibrator of highest penalised likelihood (`judged_tokens` makes the pairs)."""
    start = np.array(Calibrator().weights)
    if not judged:
        return Calibrator()
    rows = np.array([features(evidence) for evidence, _ in judged])
    accepted = np.array([was_accepted for _, was_accepted in judged], dtype=np.float64)
    # In units of each feature's spread, so that one ridge means the same for all; a feature that
    # hardly varies (the bias above all) tells nothing and is held as tightly as one that does.
    scale = np.maximum(rows.std(axis=0), 1.0)
    penalty = ridge * scale**2
    weights = _newton(rows, accepted, start, penalty, max_steps=max_steps)
    return Calibrator(**dict(zip(FEATURES, weights.tolist(), strict=True)), num_judged=len(judged))


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
