"""Slopes of series with a known growth."""

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest

from tests.endurance.slopes import Sample, Slope, slope_of

_EVERY_S = 2.0
_HOUR_S = 3600.0


def samples(
    value: Callable[[float], float], *, run_s: float = 900.0, life: object = 0, since_s: float = 0.0
) -> list[Sample]:
    times = [since_s + i * _EVERY_S for i in range(int(run_s / _EVERY_S))]
    return [Sample(at_s=at_s, life=str(life), value=value(at_s)) for at_s in times]


def slope(series: Sequence[Sample], *, block_s: float = 20.0) -> Slope:
    fitted = slope_of(series, block_s=block_s)
    assert fitted is not None
    return fitted


def wander(rng: Random, *, memory_s: float) -> Callable[[float], float]:
    """Noise of standard deviation 1 that forgets within `memory_s`."""
    correlation = math.exp(-_EVERY_S / memory_s)
    value = rng.gauss(0.0, 1.0)

    def at(at_s: float) -> float:
        nonlocal value
        value = correlation * value + math.sqrt(1.0 - correlation * correlation) * rng.gauss(
            0.0, 1.0
        )
        return value

    return at


def test_a_leak_of_two_mebibytes_an_hour_is_found_and_measured() -> None:
    rng = Random(1)
    fitted = slope(samples(lambda at_s: 200.0 + 2.0 * at_s / _HOUR_S + rng.gauss(0.0, 0.2)))
    assert not fitted.is_below(1.0)
    assert fitted.low_per_h < 2.0 < fitted.high_per_h
    assert fitted.high_per_h - fitted.low_per_h < 1.0


def test_a_growth_that_is_certainly_small_is_below_the_limit() -> None:
    rng = Random(2)
    fitted = slope(samples(lambda at_s: 200.0 + 0.5 * at_s / _HOUR_S + rng.gauss(0.0, 0.05)))
    assert fitted.low_per_h > 0.0
    assert fitted.is_below(1.0)
    assert not fitted.is_below(0.1)


def test_what_shrinks_is_below_every_limit() -> None:
    assert slope(samples(lambda at_s: 200.0 - at_s)).is_below(1.0)


def test_a_constant_has_no_slope_and_no_interval() -> None:
    fitted = slope(samples(lambda at_s: 7.0))
    assert (fitted.per_h, fitted.low_per_h, fitted.high_per_h) == (0.0, 0.0, 0.0)
    assert fitted.is_below(1.0)


@pytest.mark.parametrize("memory_s", [0.1, 10.0, 30.0, 100.0])
def test_noise_without_growth_is_rarely_taken_for_growth(memory_s: float) -> None:
    rng = Random(3)
    alarms = sum(
        not slope(samples(wander(rng, memory_s=memory_s))).is_below(0.0) for _ in range(100)
    )
    assert alarms <= 6  # 2.5 % are expected


def test_a_line_fitted_to_the_same_noise_without_regard_to_correlation_would_often_alarm() -> None:
    """The reason for all the rest: blocks of one sample each, and no correlation."""
    rng = Random(3)
    alarms = 0
    for _ in range(100):
        series = samples(wander(rng, memory_s=30.0))
        fitted = slope(series, block_s=_EVERY_S)
        widening = math.sqrt((1.0 + fitted.correlation) / (1.0 - fitted.correlation))
        alarms += fitted.per_h > (fitted.high_per_h - fitted.per_h) / widening
    assert alarms >= 20


def test_the_interval_has_the_true_slope_in_it_as_often_as_it_says() -> None:
    rng = Random(4)
    hits = 0
    for _ in range(100):
        noise = wander(rng, memory_s=20.0)
        fitted = slope(samples(lambda at_s, noise=noise: 6.0 * at_s / _HOUR_S + noise(at_s)))
        hits += fitted.low_per_h <= 6.0 <= fitted.high_per_h
    assert hits >= 90


def test_a_process_that_starts_higher_than_the_one_before_is_no_leak() -> None:
    rng = Random(5)
    first = samples(lambda at_s: 200.0 + rng.gauss(0.0, 0.2), run_s=400.0, life="first")
    second = samples(
        lambda at_s: 260.0 + rng.gauss(0.0, 0.2), run_s=400.0, life="later", since_s=460.0
    )
    assert slope(first + second).is_below(1.0)
    single_life = [Sample(at_s=s.at_s, life="one", value=s.value) for s in first + second]
    assert slope(single_life).per_h > 100.0  # the test can tell


def test_a_leak_in_every_life_is_found_although_each_starts_again() -> None:
    rng = Random(6)
    lives = [
        samples(
            lambda at_s, k=k: 200.0 + 20.0 * (at_s - 300.0 * k) / _HOUR_S + rng.gauss(0.0, 0.1),
            run_s=300.0,
            life=k,
            since_s=300.0 * k,
        )
        for k in range(3)
    ]
    assert not slope([s for life in lives for s in life]).is_below(1.0)


def test_a_life_of_two_blocks_says_nothing() -> None:
    assert slope_of(samples(lambda at_s: at_s, run_s=40.0), block_s=20.0) is None
    assert slope_of([], block_s=20.0) is None
