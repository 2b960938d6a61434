"""Random deviates: one draw of randomness that is used for many distributions.

Thompson sampling with `redraw: round` needs one draw for a whole round, while Calibration-TS has
another posterior for every token. A `Deviate` is that one draw: it returns samples of Beta(a, b)
for any parameters from the same randomness. Each sample alone is an exact draw; samples of one
deviate are coupled, so that all tokens of a round have high or low samples together.

Gamma draws: Marsaglia and Tsang, "A simple method for generating gamma variables", 2000, which
accepts its first normal more than 95 times in a hundred and is smooth in the shape. The coupling
needs this; `random.betavariate` would break it.
"""

import math
from random import Random

import numpy as np

from eesd_dist.control.chain_rule import Doubles


class Deviate:
    """A draw of randomness for many distributions."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._good = _GammaChance(rng)
        self._bad = _GammaChance(rng)

    def beta(self, a: float, b: float) -> float:
        """Returns a draw of Beta(a, b), computed from two gamma draws, in logarithms so that tiny
        parameters do not give 0/0."""
        odds_log = self._bad.log_gamma_draw(b) - self._good.log_gamma_draw(a)
        return 1.0 / (1.0 + math.exp(min(odds_log, 700.0)))

    def betas(self, a: Doubles, b: Doubles) -> Doubles:
        """Returns `beta` of each pair, which are at least 1."""
        odds_log = self._bad.log_gamma_draws(b) - self._good.log_gamma_draws(a)
        betas: Doubles = 1.0 / (1.0 + np.exp(odds_log))
        return betas


class _GammaChance:
    """Stream of random numbers of one gamma variable, stored so that it can be replayed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._tries: list[tuple[float, float]] = []
        self._boost_log = math.log(1.0 - rng.random())

    def log_gamma_draw(self, shape: float) -> float:
        if shape < 1.0:  # Gamma(a) = Gamma(a + 1) * U^(1/a)
            return self._log_draw(shape + 1.0) + self._boost_log / max(shape, 1e-12)
        return self._log_draw(shape)

    def log_gamma_draws(self, shapes: Doubles) -> Doubles:
        """Returns `log_gamma_draw` of each shape, which are at least 1."""
        x, log_u = self._try(0)
        d = shapes - 1.0 / 3.0
        v = np.maximum(1.0 + x / np.sqrt(9.0 * d), 1e-9) ** 3
        log_v = np.log(v)
        draws: Doubles = np.log(d) + log_v
        for at in np.flatnonzero(log_u >= 0.5 * x * x + d * (1.0 - v + log_v)):
            draws[at] = self._log_draw(float(shapes[at]))
        return draws

    def _log_draw(self, shape: float) -> float:
        d = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        attempt = 0
        while True:
            x, log_u = self._try(attempt)
            attempt += 1
            root = 1.0 + c * x
            if root <= 0.0:
                continue
            v = root * root * root
            if log_u < 0.5 * x * x + d * (1.0 - v + math.log(v)):
                return math.log(d * v)

    def _try(self, index: int) -> tuple[float, float]:
        while index >= len(self._tries):
            u = 1.0 - self._rng.random()
            self._tries.append((self._rng.gauss(0.0, 1.0), math.log(u)))
        return self._tries[index]
