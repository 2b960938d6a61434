"""The time a head saves: texts written with and without speculation, in turn, on one engine.

The controller is the default one. Which texts, and what else is said of a head, is `evaluate`'s.
"""

import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from eesd_dist.control.cost import CostModel
from eesd_dist.control.regret import hindsight
from eesd_dist.distill.rounds import (
    MAX_DRAFT_TOKENS,
    Asked,
    Machine,
    request_id_of,
    request_of,
    serving_engine,
)
from eesd_dist.engine.core import EngineCore
from eesd_dist.errors import ConfigError
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import Outcome, SpeculationParams, TokenId

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The default controller against plain decoding, one request at a time."""

    plain_tokens_per_s: float
    tokens_per_s: float
    over_plain: float
    low: float
    high: float
    """Middle 95 % of a bootstrap over prompts."""
    predicted_over_plain: float
    """The same rounds by the cost model: what acceptance alone explains, prompts not counted."""
    tokens_per_round: float
    drafted_per_round: float
    num_texts: int
    texts_unlike_plain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One text, written with and without speculation."""

    temperature: float
    plain_s: float
    drafted_s: float
    num_tokens: int
    is_equal: bool
    outcomes: tuple[Outcome, ...]


def time_head(
    machine: Machine,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    max_length: int,
    seed: int,
    stop_token_ids: tuple[int, ...],
) -> tuple[list[Timing], CostModel]:
    """One request at a time; with and without speculation take turns in going first, so that a
    machine that slows down slows both. The costs are what the engine measured at its start."""
    engine = serving_engine(machine, max_length=max_length)
    if engine.cost is None:
        raise ConfigError(f"{machine.head}: the engine drafts nothing with this head")
    asked = [
        Asked(prompt=prompt, temperature=temperature, seed=seed + number)
        for number, prompt in enumerate(prompts)
        for temperature in temperatures
    ]
    write = _Stopwatch(engine, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    write(asked[0], "auto")  # allocates, warms the caches
    timings: list[Timing] = []
    for number, one in enumerate(
        tqdm(asked, desc="speed", unit="text", file=sys.stderr, disable=None)
    ):
        if number % 2:
            drafted, plain = write(one, "auto"), write(one, "off")
        else:
            plain, drafted = write(one, "off"), write(one, "auto")
        timings.append(
            Timing(
                temperature=one.temperature,
                plain_s=plain.seconds,
                drafted_s=drafted.seconds,
                num_tokens=len(plain.tokens),
                is_equal=plain.tokens == drafted.tokens,
                outcomes=tuple(drafted.outcomes),
            )
        )
    return timings, engine.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    seconds: float
    tokens: list[TokenId]
    outcomes: list[Outcome]


class _Stopwatch:
    """Writes one text after the other, and says how long each took."""

    def __init__(
        self, engine: EngineCore, *, max_tokens: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._count = 0

    def __call__(self, asked: Asked, mode: str) -> _Written:
        self._count += 1
        request = request_of(
            request_id_of("speed", self._count),
            asked,
            max_tokens=self._max_tokens,
            stop_token_ids=self._stop_token_ids,
            speculation=SpeculationParams(mode="off" if mode == "off" else "auto"),
        )
        tokens: list[TokenId] = []
        outcomes: list[Outcome] = []
        began = time.perf_counter()
        self._engine.add(request)
        while self._engine.has_work:
            result = self._engine.step(wait_s=0.0)
            outcomes.extend(result.outcomes)
            for emission in result.emissions:
                tokens.extend(emission.tokens)
        return _Written(seconds=time.perf_counter() - began, tokens=tokens, outcomes=outcomes)


def speed_of(timings: Sequence[Timing], *, cost: CostModel, seed: int) -> Speed:
    plain_s = sum(timing.plain_s for timing in timings)
    drafted_s = sum(timing.drafted_s for timing in timings)
    num_tokens = sum(timing.num_tokens for timing in timings)
    outcomes = [outcome for timing in timings for outcome in timing.outcomes]
    seen = hindsight(outcomes, cost=cost, max_length=MAX_DRAFT_TOKENS)
    low, high = _interval(timings, seed=seed)
    num_rounds = max(len(outcomes), 1)
    return Speed(
        plain_tokens_per_s=num_tokens / plain_s,
        tokens_per_s=num_tokens / drafted_s,
        over_plain=plain_s / drafted_s,
        low=low,
        high=high,
        predicted_over_plain=seen.rate / seen.plain_rate,
        tokens_per_round=sum(1 + outcome.num_accepted for outcome in outcomes) / num_rounds,
        drafted_per_round=sum(outcome.num_drafted for outcome in outcomes) / num_rounds,
        num_texts=len(timings),
        texts_unlike_plain=sum(not timing.is_equal for timing in timings),
    )


def _interval(timings: Sequence[Timing], *, seed: int) -> tuple[float, float]:
    """Percentile bootstrap over texts (Efron and Tibshirani 1993, chapter 13)."""
    rng = random.Random(f"bootstrap/{seed}")
    ratios: list[float] = []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(timings, k=len(timings))
        ratios.append(sum(t.plain_s for t in drawn) / sum(t.drafted_s for t in drawn))
    ratios.sort()
    last = len(ratios) - 1
    return ratios[math.floor(0.025 * last)], ratios[math.ceil(0.975 * last)]
