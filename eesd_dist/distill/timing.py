"""Times a head: texts generated with and without speculation, alternating, by one writer.

Uses the default controller. `evaluate` chooses the texts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.control.regret import hindsight
from eesd_dist.distill.answers import MAX_DRAFT_TOKENS, Machine, Query
from eesd_dist.distill.executor import Executor
from eesd_dist.distill.sources import Written
from eesd_dist.errors import ConfigError
from eesd_dist.model.spec import ModelSpec
from eesd_dist.progress import progress_bar
from eesd_dist.statistics import Interval, Rows, bootstrap
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of the default controller against plain decoding, one request at a time."""

    plain_tokens_per_s: float
    tokens_per_s: float
    over_plain: float
    low: float
    high: float
    """`low` and `high`: 95 % bootstrap interval over prompts."""
    predicted_over_plain: float
    """The same ratio by the cost model for the same rounds, without prefill."""
    tokens_per_round: float
    drafted_per_round: float
    num_texts: int
    texts_unlike_plain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one text, with and without speculation."""

    temperature: float
    plain_s: float
    drafted_s: float
    num_tokens: int
    is_equal: bool
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedHead:
    """Times of several texts, and the measured cost model of the engine that wrote them."""

    timings: tuple[Timing, ...]
    cost: CostModel

    def at(self, temperature: float) -> "TimedHead":
        timings = (timing for timing in self.timings if timing.temperature == temperature)
        return replace(self, timings=tuple(timings))

    def speed(self, *, seed: int) -> Speed:
        return speed_of(self.timings, cost=self.cost, seed=seed)


def time_head(
    executor: Executor,
    machine: Machine,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    max_length: int,
    seed: int,
) -> TimedHead | None:
    """Times one request after the other. The order of speculation on and off alternates, so that a
    slower machine affects both. Returns None where the executor has no engine with this head."""
    stop_token_ids = ModelSpec.from_folder(machine.model).eos_token_ids
    speculation = SpeculationConfig(max_draft_tokens=MAX_DRAFT_TOKENS)
    writer = executor.writer(machine.engine(speculation, batch=1, max_length=max_length))
    if writer is None:
        return None
    if writer.cost is None:
        raise ConfigError(f"{machine.head}: the engine drafts nothing with this head")

    names = (f"speed-{number}" for number in count(1))

    def timed(query: Query, mode: Literal["off", "auto"]) -> tuple[float, Written]:
        request = query.request(
            next(names), max_tokens=max_tokens, stop_token_ids=stop_token_ids, mode=mode
        )
        began = time.perf_counter()
        (written,) = writer.write([request])
        return time.perf_counter() - began, written

    queries = [
        Query(prompt=prompt, temperature=temperature, seed=seed + number)
        for number, prompt in enumerate(prompts)
        for temperature in temperatures
    ]
    timed(queries[0], "auto")  # warm-up
    timings: list[Timing] = []
    for number, query in enumerate(progress_bar(queries, title="speed", unit="text")):
        if number % 2:
            (drafted_s, drafted), (plain_s, plain) = timed(query, "auto"), timed(query, "off")
        else:
            (plain_s, plain), (drafted_s, drafted) = timed(query, "off"), timed(query, "auto")
        timings.append(
            Timing(
                temperature=query.temperature,
                plain_s=plain_s,
                drafted_s=drafted_s,
                num_tokens=len(plain.tokens),
                is_equal=plain.tokens == drafted.tokens,
                outcomes=tuple(drafted.outcomes),
            )
        )
    return TimedHead(timings=tuple(timings), cost=writer.cost)


def speed_of(timings: Sequence[Timing], *, cost: CostModel, seed: int) -> Speed:
    plain_s = sum(timing.plain_s for timing in timings)
    drafted_s = sum(timing.drafted_s for timing in timings)
    num_tokens = sum(timing.num_tokens for timing in timings)
    outcomes = [outcome for timing in timings for outcome in timing.outcomes]
    seen = hindsight(outcomes, cost=cost, max_length=MAX_DRAFT_TOKENS)
    interval = _interval(timings, seed=seed)
    num_rounds = max(len(outcomes), 1)
    return Speed(
        plain_tokens_per_s=num_tokens / plain_s,
        tokens_per_s=num_tokens / drafted_s,
        over_plain=plain_s / drafted_s,
        low=interval.low,
        high=interval.high,
        predicted_over_plain=seen.rate / seen.plain_rate,
        tokens_per_round=sum(1 + outcome.num_accepted for outcome in outcomes) / num_rounds,
        drafted_per_round=sum(outcome.num_drafted for outcome in outcomes) / num_rounds,
        num_texts=len(timings),
        texts_unlike_plain=sum(not timing.is_equal for timing in timings),
    )


def _interval(timings: Sequence[Timing], *, seed: int) -> Interval:
    """Returns a bootstrap interval of the speed-up over texts."""
    plain_s = np.array([timing.plain_s for timing in timings])
    drafted_s = np.array([timing.drafted_s for timing in timings])

    def speed_up(groups: list[Rows]) -> NDArray[np.float64]:
        (rows,) = groups
        return np.asarray(plain_s[rows].sum(axis=-1) / drafted_s[rows].sum(axis=-1))

    return bootstrap(speed_up, [len(timings)], seed=seed)
