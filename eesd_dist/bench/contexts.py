"""The table of `eesd bench control --only contexts`: drafting over plain decoding, by context.

For every temperature, context and load, `goodput` with the service's settings races plain decoding
on one engine, in many short blocks that alternate. Prompts are computed once and then reused, so
that the seconds are those of decoding. The engine learns costs from the rounds of both.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file

from eesd_dist.bench.crowds import Crowd, all_at_once, in_turn, texts_of
from eesd_dist.bench.live import PLAIN, Race, Track
from eesd_dist.bench.output import Say
from eesd_dist.bench.replay import Variant
from eesd_dist.bench.round_breakdown import round_s, without_prefill
from eesd_dist.config import CacheConfig, EngineConfig, SchedulerConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import build_local_engine
from eesd_dist.model.weights import SINGLE_FILE
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import RoundStats

GOODPUT = Variant(label="goodput", controller="goodput")
TARGET = 0.98
"""Aim for the lower end of every interval."""
_NUM_PROMPTS = 4
_FEWEST_BLOCKS = 8
_REQUESTS = 24
"""Minimum number of blocks times requests at a time."""
_SHARE = 0.95
_FEWEST_ROUNDS = 20
"""Rounds from which a median is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Place in the table."""

    temperature: float
    context: int
    load: int

    @property
    def name(self) -> str:
        return f"T {self.temperature:g}, {self.context} tokens, {self.load} at a time"


def cells_of(
    temperatures: Sequence[float], contexts: Sequence[int], loads: Sequence[int], *, longest: int
) -> list[Cell]:
    """Returns the table's places; contexts above `longest` positions are left out."""
    return [
        Cell(temperature=temperature, context=context, load=load)
        for context in contexts
        if context <= longest
        for temperature in temperatures
        for load in loads
    ]


def write_useless_head(head: Path, folder: Path) -> Path:
    """Writes a copy of an exit head with random weights: its drafts are hardly ever accepted;
    its calibration, which says otherwise, stays. Returns the folder."""
    copytree(head, folder)
    weights, generator = load_file(folder / SINGLE_FILE), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.ndim > 1:
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = (noise * weight.float().std()).to(weight.dtype)
    save_file(weights, folder / SINGLE_FILE)
    return folder


def prompts_of_context(prompts: Sequence[Prompt], context: int) -> list[Prompt]:
    """Returns prompts of exactly `context` tokens: the end of several prompts, one after another,
    repeated if they are too few."""
    texts: list[Prompt] = []
    for last in range(min(_NUM_PROMPTS, len(prompts))):
        before = [*reversed(prompts[:last]), *reversed(prompts[last + 1 :])]
        tokens = prompts[last].tokens
        for prompt in cycle(before or prompts):
            if len(tokens) >= context:
                break
            tokens = prompt.tokens + tokens
        texts.append(Prompt(workload="context", tokens=tokens[-context:]))
    return texts


def config_for(config: EngineConfig, cells: Sequence[Cell], *, max_tokens: int) -> EngineConfig:
    """Returns the engine's configuration with room for the largest cell, and the service's own
    settings of speculation."""
    page, longest = config.cache.page_size, max(cell.context for cell in cells)
    load = max(cell.load for cell in cells)
    own_pages = 2 + (max_tokens + config.speculation.max_draft_tokens) // page
    # Requests that draft share no pages with others; and pages of texts that have ended must not
    # push out those of prompts.
    num_pages = 3 * (_NUM_PROMPTS * (longest // page + 1) + (load + 1) * own_pages)
    ceiling = config.speculation.max_draft_tokens
    return config.model_copy(
        update={
            "cache": CacheConfig(page_size=page, num_pages=num_pages, prefix_caching=True),
            "scheduler": SchedulerConfig(max_running=load, max_waiting=1 << 20),
            "speculation": config.speculation.model_copy(
                update={"prompt_lookup": True, "fixed_length": ceiling}
            ),
        }
    )


def race_contexts(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    max_tokens: int,
    seed: int,
    cost: CostModel | None,
    clock: Callable[[], float],
    say: Say,
) -> Iterator[tuple[Cell, Race]]:
    """Races every cell, all of them on one engine. `config`: as of `config_for`; `cost`: None
    measures it."""
    rng = Random(seed)
    engine = build_local_engine(config, book=BeliefBook(max_workloads=4096), cost=cost)
    try:
        for cell in cells:
            texts = texts_of(
                prompts_of_context(prompts, cell.context),
                temperatures=[cell.temperature],
                max_tokens=max_tokens,
                stop_token_ids=(),
                seed=1000 + seed,
            )
            track = Track(engine, texts, clock=clock)
            track.race([[all_at_once(len(texts))]], [PLAIN, GOODPUT])  # computes the prompts
            num_blocks = max(_FEWEST_BLOCKS, _REQUESTS // cell.load)
            blocks: list[list[Crowd]] = [
                [in_turn(len(texts), cell.load, rng=rng)] for _ in range(num_blocks)
            ]
            race = track.race(blocks, [PLAIN, GOODPUT])
            say(_line(cell, row_of(race)))
            yield cell, race
    finally:
        engine.close()


def row_of(race: Race) -> dict[str, object]:
    """Returns a cell's figures.

    `declined_ms`: how much longer a round without drafts takes than a plain one, by medians;
    `drafting_share`: part of the seconds that rounds with drafts take. Where drafts never pay, that
    is exploration.
    """
    label = GOODPUT.label
    interval = race.interval(label, PLAIN.label, share=_SHARE)
    rounds = without_prefill(race.rounds(label))
    drafted = [stats for stats in rounds if stats.drafted_by_position]
    declined = [stats for stats in rounds if not stats.drafted_by_position]
    plain = without_prefill(race.rounds(PLAIN.label))
    total_s = sum(map(round_s, rounds))
    enough = min(len(declined), len(plain)) >= _FEWEST_ROUNDS
    return {
        "over_plain": round(race.ratio(label, PLAIN.label), 3),
        "over_plain_95": [round(interval.low, 3), round(interval.high, 3)],
        "plain_tokens_per_s": round(race.rate(PLAIN.label), 1),
        "declined_ms": round(1e3 * (_median_s(declined) - _median_s(plain)), 3) if enough else None,
        "drafting_share": round(sum(map(round_s, drafted)) / total_s, 4) if total_s else None,
        "blocks": len(race.blocks),
        "texts_unlike_plain": race.texts_unlike_plain,
    }


def _line(cell: Cell, row: dict[str, object]) -> str:
    return (
        f"{cell.name:38} {row['over_plain']:.3f} {row['over_plain_95']}  "
        f"plain {row['plain_tokens_per_s']} tok/s, declined {row['declined_ms']} ms, "
        f"drafting {row['drafting_share']}"
    )


def summary_of_contexts(rows: Sequence[tuple[Cell, Race]]) -> dict[str, object]:
    """Returns the table and its worst place."""
    table = [
        {"temperature": cell.temperature, "context": cell.context, "load": cell.load} | row_of(race)
        for cell, race in rows
    ]
    lows = [race.interval(GOODPUT.label, PLAIN.label, share=_SHARE).low for _, race in rows]
    return {
        "lowest": round(min(lows), 3),
        "below_target": sum(low < TARGET for low in lows),
        "target": TARGET,
        "texts_unlike_plain": sum(race.texts_unlike_plain for _, race in rows),
        "cells": table,
    }


def _median_s(rounds: Sequence[RoundStats]) -> float:
    return statistics.median(map(round_s, rounds))
