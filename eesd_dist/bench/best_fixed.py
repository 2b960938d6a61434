"""Compares a controller with the best fixed length, which other prompts of the class have chosen.

A length that is chosen by the prompts that it is then measured on has an advantage: with eight
lengths and a few prompts the best of them is the luckiest. Here each prompt is compared with the
length that is fastest on all other prompts of its class. Independent of engines and controllers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eesd_dist.statistics import Rows, bootstrap


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`low` and `high`: 95 % bootstrap interval over prompts."""

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
    other_s: float


def against_others_choice(
    ours_s: Sequence[float], fixed_s: Mapping[str, Sequence[float]]
) -> list[PromptTimes]:
    """Returns the times of each prompt. `fixed_s`: by length, the seconds of each prompt."""
    totals = {name: sum(seconds) for name, seconds in fixed_s.items()}
    times: list[PromptTimes] = []
    for at, seconds in enumerate(ours_s):
        others = {name: total - fixed_s[name][at] for name, total in totals.items()}
        best = min(others, key=lambda name: others[name])
        times.append(PromptTimes(ours_s=seconds, other_s=fixed_s[best][at]))
    return times


def over_other(times: Sequence[PromptTimes]) -> Ratio:
    """Returns the speed of ours over that of the other."""
    return mean_over_other([times])


def mean_over_other(classes: Sequence[Sequence[PromptTimes]]) -> Ratio:
    """Returns the mean over classes; prompts are drawn within their class."""
    ours_s = [np.array([times.ours_s for times in prompts]) for prompts in classes]
    fixed_s = [np.array([times.other_s for times in prompts]) for prompts in classes]

    def mean_speed_up(rows_of: Sequence[Rows]) -> NDArray[np.float64]:
        ratios = [
            fixed[rows].sum(axis=-1) / ours[rows].sum(axis=-1)
            for fixed, ours, rows in zip(fixed_s, ours_s, rows_of, strict=True)
        ]
        return np.asarray(np.mean(ratios, axis=0))

    sizes = [len(prompts) for prompts in classes]
    interval = bootstrap(mean_speed_up, sizes)
    return Ratio(
        value=float(mean_speed_up([np.arange(size) for size in sizes])),
        low=interval.low,
        high=interval.high,
    )
