"""Rounds of one engine in which all requests draft equally many tokens."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from eesd_dist.bench.costs.form import RoundCost
from eesd_dist.bench.round_breakdown import round_s
from eesd_dist.engine.core import EngineCore
from eesd_dist.statistics import usual_s
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import (
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
)

_WARM_UP = 2
"""First rounds of a batch that are not counted: caches are cold and the exit head catches up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRound:
    stats: RoundStats
    context_tokens: float


@dataclass(slots=True, kw_only=True)
class RoundTimes:
    """Rounds of one setting, over all repeats."""

    rounds: list[TimedRound] = field(default_factory=list)

    def cost(self, *, num_requests: int, num_draft_tokens: int) -> RoundCost:
        """Returns usual times. The tokens are a mean."""
        stats = [timed.stats for timed in self.rounds]
        return RoundCost(
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
            context_tokens=round(statistics.fmean(timed.context_tokens for timed in self.rounds)),
            draft_s=round(usual_s([row.draft_s for row in stats]), 7),
            verify_s=round(usual_s([row.verify_s for row in stats]), 7),
            round_s=round(usual_s([round_s(row) for row in stats]), 7),
            tokens_per_round=round(statistics.fmean(row.num_emitted for row in stats), 4),
            num_rounds=len(stats),
        )

    def survivors(self, longest: int) -> tuple[Counter[int], int]:
        """Returns drafts by position that were accepted up to it, and the number of drafts, of
        rounds that drafted `longest` tokens for every request."""
        accepted: Counter[int] = Counter()
        num_drafts = 0
        for timed in self.rounds:
            stats = timed.stats
            if stats.num_drafted == longest * stats.num_requests:
                num_drafts += stats.num_requests
                accepted.update(dict(enumerate(stats.accepted_by_position)))
        return accepted, num_drafts


def run_rounds(
    engine: EngineCore,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    num_draft_tokens: int,
    max_tokens: int,
    label: str,
) -> list[TimedRound]:
    """Runs all prompts, `batch` at a time; returns the rounds in which a whole batch decodes.

    The engine's `fixed` controller must be set to `num_draft_tokens`; with 0 nothing is drafted.
    """
    timed: list[TimedRound] = []
    remaining = iter(prompts)
    number = 0
    while len(group := list(islice(remaining, batch))) == batch:
        number += 1
        requests = [
            _request(prompt, f"{label}-{number}-{at}", num_draft_tokens, max_tokens)
            for at, prompt in enumerate(group)
        ]
        timed += _run_batch(engine, requests, num_draft_tokens=num_draft_tokens)
    return timed


def _request(prompt: Prompt, name: str, num_draft_tokens: int, max_tokens: int) -> Request:
    if num_draft_tokens:
        speculation = SpeculationParams(controller="fixed", max_draft_tokens=num_draft_tokens)
    else:
        speculation = SpeculationParams(mode="off")
    return Request(
        request_id=RequestId(name),
        prompt=prompt.tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        speculation=speculation,
    )


def _run_batch(
    engine: EngineCore, requests: Sequence[Request], *, num_draft_tokens: int
) -> list[TimedRound]:
    lengths = {request.request_id: len(request.prompt) for request in requests}
    for request in requests:
        engine.add(request)
    rounds: list[TimedRound] = []
    while engine.has_work:
        result = engine.step(wait_s=0.0)
        for stats in result.rounds:
            context = statistics.fmean(lengths[request_id] for request_id in stats.request_ids)
            rounds.append(TimedRound(stats=stats, context_tokens=context))
        for emission in result.emissions:
            lengths[emission.request_id] += len(emission.tokens)
    rows = len(requests) * (num_draft_tokens + 1)
    steady = [
        timed
        for timed in rounds
        if timed.stats.num_prefill_rows == 0
        and timed.stats.num_requests == len(requests)
        and timed.stats.num_rows == rows
    ]
    return steady[_WARM_UP:]
