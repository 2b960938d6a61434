"""Compares a controller with the best fixed length, which other prompts of the class have chosen.

A length that is chosen by the prompts that it is then measured on has an advantage: with eight
lengths and a few prompts the best of them is the luckiest. Here each prompt is compared with the
length that is fastest on all other prompts of its class. Independent of engines and controllers.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`low` and `high`: 95 % percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter
    13)."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {
            "value": round(self.value, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """Seconds for the same text."""

    ours_s: float
    best_fixed_s: float


def against_others_choice(
    ours_s: Sequence[float], fixed_s: Mapping[str, Sequence[float]]
) -> list[PromptTimes]:
    """Returns the times of each prompt. `fixed_s`: by length, the seconds of each prompt."""
    totals = {name: sum(seconds) for name, seconds in fixed_s.items()}
    times: list[PromptTimes] = []
    for at, seconds in enumerate(ours_s):
        others = {name: total - fixed_s[name][at] for name, total in totals.items()}
        best = min(others, key=lambda name: others[name])
        times.append(PromptTimes(ours_s=seconds, best_fixed_s=fixed_s[best][at]))
    return times


def over_best_fixed(times: Sequence[PromptTimes]) -> Ratio:
    """Returns the speed of ours over that of the best fixed length."""
    return mean_over_best_fixed([times])


def mean_over_best_fixed(classes: Sequence[Sequence[PromptTimes]]) -> Ratio:
    """Returns the mean over classes; prompts are drawn within their class."""
    rng = random.Random("bootstrap")
    drawn = sorted(
        fmean(_speed_up(rng.choices(times, k=len(times))) for times in classes)
        for _ in range(_RESAMPLES)
    )
    return Ratio(
        value=fmean(map(_speed_up, classes)),
        low=drawn[int(0.025 * _RESAMPLES)],
        high=drawn[int(0.975 * _RESAMPLES)],
    )


def _speed_up(times: Sequence[PromptTimes]) -> float:
    return sum(one.best_fixed_s for one in times) / sum(one.ours_s for one in times)
