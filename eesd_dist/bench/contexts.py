"""The table of `eesd bench control --only contexts`: drafting over plain decoding, by context.

For every temperature, context and load, `goodput` with the service's settings races plain decoding
on one engine, in many short blocks that alternate. Prompts are computed once and then reused, so
that the seconds are those of decoding. The engine learns costs from the rounds of both.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eesd_dist.bench.control_inputs import (
    PAGE_SIZE,
    clock_of,
    cost_of,
    head_of,
    model_config_of,
)
from eesd_dist.bench.crowds import Crowd, all_at_once, in_turn, texts_of
from eesd_dist.bench.live import PLAIN, Race, Track
from eesd_dist.bench.options import ControlOptions
from eesd_dist.bench.output import Say, print_report
from eesd_dist.bench.replay import Variant
from eesd_dist.bench.round_breakdown import round_s, without_prefill
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import ConfigError
from eesd_dist.model.weights import SINGLE_FILE
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.text.prompts import load_prompts, prompts_of_context
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import RoundStats

GOODPUT = Variant(label="goodput", controller="goodput")
TARGET = 0.98
"""Aim for the lower end of every interval."""
_MAX_TOKENS = 48
_NUM_PROMPTS = 4
_FEWEST_BLOCKS = 8
_REQUESTS = 24
"""Minimum number of blocks times requests at a time."""
_SHARE = 0.95
_FEWEST_ROUNDS = 20
"""Rounds from which a median is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of the table."""

    temperature: float
    context: int
    load: int


def cells_of(
    temperatures: Sequence[float], contexts: Sequence[int], loads: Sequence[int], *, longest: int
) -> list[Cell]:
    """Returns the cells of the table; contexts above `longest` positions are left out."""
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


def compare_contexts(options: ControlOptions, say: Say) -> None:
    """Prints the table. Raises ConfigError without a head, or if no context fits the model."""
    if options.quick or options.record is not None or options.traces is not None:
        raise ConfigError("--only contexts takes neither --quick nor --record nor --traces")
    prompts = load_prompts(Tokenizer.load(options.model), options.prompts)
    max_tokens = options.max_tokens or _MAX_TOKENS
    model = model_config_of(options)
    layout = layout_of(EngineConfig(model=model))
    head, clock = head_of(options, layout), clock_of(options, layout.device)
    longest = layout.max_model_len - max_tokens
    cells = cells_of(options.temperatures, options.contexts, options.loads, longest=longest)
    if not cells:
        raise ConfigError(
            f"contexts {list(options.contexts)} with {max_tokens} tokens more: the model has "
            f"{layout.max_model_len} positions; use shorter --contexts"
        )
    rng = Random(options.seed)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        if options.useless_head:
            head = write_useless_head(head, Path(folder, "head"))
        model = model.model_copy(update={"head": head})
        engine = build_local_engine(
            _config(options, model, cells, max_tokens),
            book=BeliefBook(max_workloads=4096),
            cost=cost_of(options),
        )
        try:
            for cell in cells:
                texts = texts_of(
                    prompts_of_context(prompts, cell.context, limit=_NUM_PROMPTS),
                    temperatures=[cell.temperature],
                    max_tokens=max_tokens,
                    stop_token_ids=(),
                    seed=1000 + options.seed,
                )
                race = _raced(Track(engine, texts, clock=clock), cell, len(texts), rng)
                rows.append(asdict(cell) | row_of(race))
                say(_line(rows[-1]))
        finally:
            engine.close()
    settings = {
        "temperatures": options.temperatures,
        "max_tokens": max_tokens,
        "max_draft_tokens": options.max_draft_tokens,
        "useless_head": options.useless_head,
        "dtype": layout.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "threads": options.threads,
        "clock": options.clock,
    }
    print_report({"summary": _summary_of(rows), "settings": settings}, seed=options.seed)


def _config(
    options: ControlOptions, model: ModelConfig, cells: Sequence[Cell], max_tokens: int
) -> EngineConfig:
    """Returns a config with room for the largest cell, and the service's settings of drafts."""
    longest, load = max(cell.context for cell in cells), max(cell.load for cell in cells)
    own_pages = 2 + (max_tokens + options.max_draft_tokens) // PAGE_SIZE
    # Requests that draft share no pages with others; and pages of texts that have ended must not
    # push out those of prompts.
    num_pages = 3 * (_NUM_PROMPTS * (longest // PAGE_SIZE + 1) + (load + 1) * own_pages)
    return EngineConfig(
        model=model,
        cache=CacheConfig(
            page_size=PAGE_SIZE, num_pages=num_pages, kv_cache_dtype=options.kv_cache_dtype
        ),
        scheduler=SchedulerConfig(max_running=load, max_waiting=1 << 20),
        speculation=SpeculationConfig(max_draft_tokens=options.max_draft_tokens, seed=options.seed),
        parallel=ParallelConfig(num_threads=options.threads),
    )


def _raced(track: Track, cell: Cell, num_texts: int, rng: Random) -> Race:
    track.race([[all_at_once(num_texts)]], [PLAIN, GOODPUT])  # computes the prompts
    num_blocks = max(_FEWEST_BLOCKS, _REQUESTS // cell.load)
    blocks: list[list[Crowd]] = [
        [in_turn(num_texts, cell.load, rng=rng)] for _ in range(num_blocks)
    ]
    return track.race(blocks, [PLAIN, GOODPUT])


def row_of(race: Race) -> dict[str, Any]:
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


def _line(row: Mapping[str, Any]) -> str:
    cell = f"T {row['temperature']:g}, {row['context']} tokens, {row['load']} at a time"
    return (
        f"{cell:38} {row['over_plain']:.3f} {row['over_plain_95']}  "
        f"plain {row['plain_tokens_per_s']} tok/s, declined {row['declined_ms']} ms, "
        f"drafting {row['drafting_share']}"
    )


def _summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the table and its lowest end."""
    lows = [row["over_plain_95"][0] for row in rows]
    return {
        "lowest": min(lows),
        "below_target": sum(low < TARGET for low in lows),
        "target": TARGET,
        "texts_unlike_plain": sum(row["texts_unlike_plain"] for row in rows),
        "cells": rows,
    }


def _median_s(rounds: Sequence[RoundStats]) -> float:
    return statistics.median(map(round_s, rounds))
