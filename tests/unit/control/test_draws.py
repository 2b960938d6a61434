"""One random deviate, many distributions."""

from random import Random

import numpy as np
import pytest

from eesd_dist.control.draws import Deviate


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.2), (1.0, 1.0), (2.0, 5.0), (80.0, 3.0)])
def test_each_answer_is_an_exact_draw(a: float, b: float) -> None:
    """Compares with the moments and the distribution function of Python's sampler."""
    rng, size = Random(11), 20_000
    ours = sorted(Deviate(rng).beta(a, b) for _ in range(size))
    theirs = sorted(rng.betavariate(a, b) for _ in range(size))
    assert sum(ours) / size == pytest.approx(a / (a + b), abs=0.01)
    # Two-sample Kolmogorov-Smirnov at about one in ten thousand: 2.2 * sqrt(2 / size)
    merged = sorted([(x, 1) for x in ours] + [(x, -1) for x in theirs])
    gap = worst = 0
    for _, step in merged:
        gap += step
        worst = max(worst, abs(gap))
    assert worst / size < 2.2 * (2 / size) ** 0.5


def test_answers_of_one_deviate_move_together() -> None:
    """A deviate that is high for one token is high for the next."""
    rng, pairs = Random(4), []
    for _ in range(3_000):
        chance = Deviate(rng)
        pairs.append((chance.beta(20.0, 5.0), chance.beta(18.0, 7.0)))
    first, second = (sorted(range(len(pairs)), key=lambda i: pairs[i][side]) for side in (0, 1))
    rank = {index: position for position, index in enumerate(second)}
    half = len(pairs) // 2
    assert sum(rank[index] < half for index in first[:half]) / half > 0.9


def test_the_same_question_has_the_same_answer() -> None:
    chance = Deviate(Random(1))
    assert chance.beta(3.0, 2.0) == chance.beta(3.0, 2.0)


@pytest.mark.parametrize(("a", "b"), [(1e-9, 1e-9), (1e-9, 5.0), (5.0, 1e-9), (1e9, 1e9)])
def test_extreme_parameters_stay_within_zero_and_one(a: float, b: float) -> None:
    rng = Random(2)
    assert all(0.0 <= Deviate(rng).beta(a, b) <= 1.0 for _ in range(200))


@pytest.mark.parametrize("seed", range(40))
def test_many_answers_at_once_are_the_same(seed: int) -> None:
    a = np.array([1.0, 1.5, 4.0, 80.0, 257.0])
    b = np.array([257.0, 1.0, 4.0, 3.0, 1.2])
    chance = Deviate(Random(seed))
    expected = [chance.beta(float(x), float(y)) for x, y in zip(a, b, strict=True)]
    assert chance.betas(a, b).tolist() == pytest.approx(expected, rel=1e-12)
