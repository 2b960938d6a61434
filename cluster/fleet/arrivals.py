"""Arrivals of requests: at a constant rate, in bursts, along the curve of a day.

All are Poisson processes with a rate that depends on the time, made by thinning one of the highest
rate (Lewis and Shedler, Naval Research Logistics Quarterly 26, 1979). Equal seeds give equal
requests.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

Rate = Callable[[float], float]
"""Requests per second at a time in seconds."""

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of the load."""

    at_s: float
    num_prompt_tokens: int
    num_tokens: int
    """Tokens of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean lengths of prompts and answers; both are drawn from exponential distributions."""

    prompt_tokens: float = 500.0
    tokens: float = 200.0


def constant(rate: float) -> Rate:
    return lambda at_s: rate


def bursts(rate: float, *, factor: float, period_s: float, lasting_s: float) -> Rate:
    """Returns `factor` times the rate for `lasting_s` at the end of every `period_s`."""
    return lambda at_s: rate * (factor if at_s % period_s >= period_s - lasting_s else 1.0)


def day(peak: float, *, trough: float) -> Rate:
    """Returns a rate between `trough`, at midnight, and `peak`, at noon."""
    middle, height = (peak + trough) / 2.0, (peak - trough) / 2.0
    return lambda at_s: middle - height * math.cos(2.0 * math.pi * at_s / _DAY_S)


def arrivals(
    rate: Rate, *, highest: float, lasting_s: float, lengths: Lengths, rng: Random
) -> Iterator[Arrival]:
    """Yields the requests of `lasting_s` seconds; `highest` bounds the rate."""
    at_s = rng.expovariate(highest)
    while at_s < lasting_s:
        if rng.random() * highest < rate(at_s):
            yield Arrival(
                at_s=at_s,
                num_prompt_tokens=_drawn(lengths.prompt_tokens, rng),
                num_tokens=_drawn(lengths.tokens, rng),
            )
        at_s += rng.expovariate(highest)


def _drawn(mean: float, rng: Random) -> int:
    return max(1, round(rng.expovariate(1.0 / mean)))
