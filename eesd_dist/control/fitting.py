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

# Shapes: N judged tokens, F features.


def fit_calibrator(
    judged: Sequence[tuple[Evidence, bool]], *, ridge: float = 1.0, max_steps: int = 50
) -> Calibrator:
    """The calibrator of highest penalised likelihood (`judged_tokens` makes the pairs)."""
    start_F = np.array(Calibrator().weights)
    if not judged:
        return Calibrator()
    x_NF = np.array([features(evidence) for evidence, _ in judged])
    y_N = np.array([accepted for _, accepted in judged], dtype=np.float64)
    # in units of each feature's spread, so that one ridge means the same for all
    scale_F = np.maximum(x_NF.std(axis=0), 1e-3)
    scale_F[-1] = 1.0
    penalty_F = ridge * scale_F**2
    weights_F = _newton(x_NF, y_N, start_F, penalty_F, max_steps=max_steps)
    return Calibrator(
        **dict(zip(FEATURES, weights_F.tolist(), strict=True)), num_judged=len(judged)
    )


def _newton(x_NF: Array, y_N: Array, start_F: Array, penalty_F: Array, *, max_steps: int) -> Array:
    weights_F = start_F
    loss = _loss(x_NF, y_N, weights_F, start_F, penalty_F)
    for _ in range(max_steps):
        p_N = _sigmoid(x_NF @ weights_F)
        gradient_F = x_NF.T @ (p_N - y_N) + penalty_F * (weights_F - start_F)
        curvature_FF = (x_NF * (p_N * (1.0 - p_N))[:, None]).T @ x_NF + np.diag(penalty_F)
        step_F = np.linalg.solve(curvature_FF, gradient_F)
        size = 1.0
        while (new := _loss(x_NF, y_N, weights_F - size * step_F, start_F, penalty_F)) > loss:
            size /= 2.0
            if size < 1e-6:
                return weights_F
        weights_F, gain, loss = weights_F - size * step_F, loss - new, new
        if gain < 1e-9 * (1.0 + abs(loss)):
            break
    return weights_F


def _loss(x_NF: Array, y_N: Array, weights_F: Array, start_F: Array, penalty_F: Array) -> float:
    score_N = x_NF @ weights_F
    likelihood = np.sum(np.logaddexp(0.0, score_N) - y_N * score_N)
    return float(likelihood + 0.5 * np.sum(penalty_F * (weights_F - start_F) ** 2))


def _sigmoid(score_N: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(score_N, -30.0, 30.0))))
