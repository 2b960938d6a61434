"""`eesd bench control`: controllers against the best fixed draft length, replayed and live.

The summary uses the live section if there is one. The best fixed length is the fastest in
hindsight, by the same figures it is then compared with: noise is in its favour.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from eesd_dist.bench.contexts import compare_contexts
from eesd_dist.bench.control_inputs import PAGE_SIZE, clock_of, cost_of, head_of, model_config_of
from eesd_dist.bench.control_report import (
    CONTENDERS,
    LiveRaces,
    class_line,
    live_over_replay,
    load_line,
    rounds_lines,
    say_replay,
    say_summary,
    summary_of,
)
from eesd_dist.bench.crowds import BURSTS, Crowd, Guest, in_turn, mixed, take_per_class, texts_of
from eesd_dist.bench.judging import (
    Findings,
    Judge,
    Rates,
    adaptive_variants,
    fixed_variants,
    tree_variants,
)
from eesd_dist.bench.live import PLAIN, Race, Track
from eesd_dist.bench.options import ControlOptions
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.bench.replay import ReplaySetting, Variant
from eesd_dist.bench.traces import Text, TraceSet, chain_length, record
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import ConfigError
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.text.prompts import Prompt, load_prompts
from eesd_dist.text.tokenizer import Tokenizer

_LEAST_LOAD = 2
"""Smaller loads have more blocks, so that every variant has as many requests there."""
_MAX_RUNNING = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Amount of work per figure."""

    per_class: int
    max_tokens: int
    class_repeats: int
    mixed_blocks: int
    load_blocks: int
    loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    loads_of_classes: tuple[int, ...] = (1,)
    """Loads at which the replay runs each class separately."""
    bursts: tuple[int, ...] = BURSTS
    max_fixed: int | None = None
    """Live: maximum number of fixed lengths, the fastest by replay; None: all."""
    tree_loads: tuple[int, ...] = (1, 4, 16)
    """Live: loads at which chains are compared with trees, all classes."""
    trees_by_class: bool = True
    contenders_only: bool = False
    """Live: whether to leave out the baselines."""


FULL = Scale(
    per_class=8,
    max_tokens=48,
    class_repeats=2,
    mixed_blocks=3,
    load_blocks=2,
    loads_of_classes=(1, 2, 4, 8, 16, 32),
)
QUICK = Scale(
    per_class=3,
    max_tokens=32,
    class_repeats=1,
    mixed_blocks=2,
    load_blocks=2,
    max_fixed=3,
    tree_loads=(1, 8),
    trees_by_class=False,
    contenders_only=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Texts and engine configuration of one benchmark run."""

    config: EngineConfig
    texts: tuple[Text, ...]
    scale: Scale
    seed: int
    cost: CostModel | None = None
    """Pinned cost model; None measures it."""
    clock: Callable[[], float] = time.perf_counter

    @property
    def ceiling(self) -> int:
        return self.config.speculation.max_draft_tokens

    def record(self) -> TraceSet:
        """Records traces on a separate engine, which drafts further and logs more than a timed
        one."""
        length = chain_length(self.ceiling)
        speculation = self.config.speculation.model_copy(
            update={"max_draft_tokens": length, "fixed_length": length, "log_evidence": True}
        )
        engine = build_local_engine(
            self.config.model_copy(update={"speculation": speculation}), cost=self.cost
        )
        try:
            traces = record(engine, self.texts, max_draft_tokens=self.ceiling)
            cost = engine.learnt_cost
            assert cost is not None
            return TraceSet(max_draft_tokens=self.ceiling, cost=cost, traces=tuple(traces))
        finally:
            engine.close()

    def engine(self) -> EngineCore:
        return build_local_engine(self.config, book=BeliefBook(max_workloads=4096), cost=self.cost)

    def learn_cost(self) -> CostModel:
        """Returns the costs that rounds of drafted and of plain texts have shown."""
        engine = self.engine()
        try:
            first_of = {
                text.workload: number for number, text in reversed(list(enumerate(self.texts)))
            }
            crowds: list[Crowd] = [(Guest(text=number),) for number in first_of.values()]
            Track(engine, self.texts).race(
                [crowds], [PLAIN, Variant(label="goodput", controller="goodput")]
            )
            assert engine.learnt_cost is not None
            return engine.learnt_cost
        finally:
            engine.close()


def race_live(
    bench: Bench, engine: EngineCore, findings: Findings | None, *, say: Say
) -> LiveRaces:
    """Races the variants on every class alone, on mixed traffic, and at every load."""
    track, scale = Track(engine, bench.texts, clock=bench.clock), bench.scale
    rng = Random(bench.seed)
    variants = _live_variants(bench.ceiling, None, scale)
    track.warm_up(variants)
    by_class: dict[str, Race] = {}
    for workload, numbers in _by_class(bench.texts).items():
        rates = findings.by_class[workload][1] if findings is not None else None
        blocks: list[list[Crowd]] = [
            [(Guest(text=number),)] for _ in range(scale.class_repeats) for number in numbers
        ]
        by_class[workload] = track.race(blocks, _live_variants(bench.ceiling, rates, scale))
        say(class_line(workload, by_class[workload]))
    crowds = [
        mixed(
            len(bench.texts),
            max_tokens=bench.texts[0].max_tokens,
            rng=Random(bench.seed + number),
            bursts=scale.bursts,
        )
        for number in range(scale.mixed_blocks)
    ]
    rates = findings.mixed if findings is not None else None
    variants = _live_variants(bench.ceiling, rates, scale)
    races = LiveRaces(by_class=by_class, mixed=track.race([[c] for c in crowds], variants))
    say(class_line("mixed traffic", races.mixed))
    for load in scale.loads:
        blocks = _load_blocks(len(bench.texts), load, count=scale.load_blocks, rng=rng)
        rates = findings.by_load[load] if findings is not None else None
        races.by_load[load] = track.race(blocks, _load_variants(bench.ceiling, rates))
        say(load_line(f"load {load}", races.by_load[load]))
        for line in rounds_lines(races.by_load[load]):
            say(line)
    for name, blocks in _tree_blocks(bench, rng).items():
        races.trees[name] = track.race(blocks, [PLAIN, *tree_variants()])
        say(load_line(f"trees, {name}", races.trees[name]))
    return races


def _tree_blocks(bench: Bench, rng: Random) -> dict[str, list[list[Crowd]]]:
    """Returns blocks with all classes at some loads, and in a full run with every class alone."""
    scale, num_texts = bench.scale, len(bench.texts)
    blocks = {
        f"load {load}": _load_blocks(num_texts, load, count=scale.load_blocks, rng=rng)
        for load in scale.tree_loads
    }
    if scale.trees_by_class:
        for workload, numbers in _by_class(bench.texts).items():
            blocks[workload] = [[(Guest(text=number),)] for number in numbers[:3]]
    return blocks


def _by_class(texts: Sequence[Text]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        groups.setdefault(text.workload, []).append(number)
    return groups


def _load_blocks(num_texts: int, load: int, *, count: int, rng: Random) -> list[list[Crowd]]:
    """Returns blocks of one crowd each; the smallest load has more blocks, and variants alternate
    more often."""
    return [[in_turn(num_texts, load, rng=rng)] for _ in range(count * max(1, _LEAST_LOAD // load))]


def _live_variants(ceiling: int, rates: Rates | None, scale: Scale) -> list[Variant]:
    """Returns plain decoding, fixed lengths and controllers; at a small scale only the fixed
    lengths that were fastest in the replay. Plain decoding is the fixed length 0."""
    fixed = [variant for variant in fixed_variants(ceiling) if variant is not PLAIN]
    if rates is not None and scale.max_fixed is not None:
        fastest = rates.fixed_in_order()[: scale.max_fixed]
        fixed = [variant for variant in fixed if variant.label in fastest]
    return [PLAIN, *fixed, *_controllers(contenders_only=scale.contenders_only)]


def _load_variants(ceiling: int, rates: Rates | None) -> list[Variant]:
    """Returns the variants at a load: plain, the best fixed length by replay, the contenders."""
    best = rates.best_fixed if rates is not None else None
    fixed = [v for v in fixed_variants(ceiling) if v is not PLAIN and v.label == best]
    return [PLAIN, *fixed, *_controllers(contenders_only=True)]


def _controllers(*, contenders_only: bool) -> list[Variant]:
    return [v for v in adaptive_variants() if not contenders_only or v.label in CONTENDERS]


def main(options: ControlOptions) -> None:
    say = say_unless(options.json)
    if options.traces is not None and options.record is not None:
        raise ConfigError("--traces replays a recording and --record makes one: use one of them")
    if options.only == "contexts":
        compare_contexts(options, say)
        return
    bench = _bench(options, QUICK if options.quick else FULL)
    if bench.cost is None:
        bench = replace(bench, cost=bench.learn_cost())
    traces, findings = None, None
    if options.only != "live":
        traces = _traces(options, bench, say)
        judge = Judge(traces, _setting(bench, traces), seed=options.seed)
        findings = judge.findings(
            loads=bench.scale.loads,
            loads_of_classes=bench.scale.loads_of_classes,
            max_tokens=max(trace.max_tokens for trace in traces.traces),
            bursts=bench.scale.bursts,
        )
        say_replay(findings, say)
    elif options.record is not None:
        _traces(options, bench, say)
    races, cost = None, bench.cost
    if options.only != "replay":
        engine = bench.engine()
        try:
            races = race_live(bench, engine, findings, say=say)
        finally:
            engine.close()
    summary = summary_of(findings, races)
    say_summary(summary, say)
    report = {
        "summary": summary,
        "live": races.as_json() if races is not None else None,
        "replay": findings.as_json() if findings is not None else None,
        "live_over_replay": live_over_replay(races, findings),
        "cost_model": cost.to_json() if cost is not None else None,
        "settings": _settings(options, bench, traces),
    }
    print_report(report, seed=options.seed)


def _traces(options: ControlOptions, bench: Bench, say: Say) -> TraceSet:
    if options.traces is not None:
        return TraceSet.load(options.traces)
    traces = bench.record()
    say(f"recorded {sum(len(trace) for trace in traces.traces)} positions")
    if options.record is not None:
        traces.save(options.record)
    return traces


def _setting(bench: Bench, traces: TraceSet) -> ReplaySetting:
    """Returns the replay's settings, the same as those of the live engine."""
    folder = layout_of(bench.config).head_folder
    return ReplaySetting(
        speculation=bench.config.speculation.model_copy(
            update={
                "max_draft_tokens": traces.max_draft_tokens,
                "fixed_length": traces.max_draft_tokens,
            }
        ),
        cost=bench.cost or traces.cost,
        calibrator=Calibrator.load(folder) if folder is not None else None,
        max_running=_MAX_RUNNING,
    )


def _bench(options: ControlOptions, scale: Scale) -> Bench:
    """Builds the benchmark. Raises ConfigError without an exit head, or if texts are too long."""
    prompts = load_prompts(Tokenizer.load(options.model), options.prompts)
    prompts = take_per_class(prompts, scale.per_class)
    max_tokens = options.max_tokens or scale.max_tokens
    config = _config(options, prompts, max_tokens)
    layout = layout_of(config)
    head_of(options, layout)
    needed = _longest(prompts) + max_tokens + chain_length(options.max_draft_tokens)
    if needed > layout.max_model_len:
        raise ConfigError(
            f"the longest prompt with its answer and drafts needs {needed} positions, the model "
            f"has {layout.max_model_len}: lower --max-tokens, or use shorter prompts"
        )
    texts = texts_of(
        prompts,
        temperatures=options.temperatures,
        max_tokens=max_tokens,
        stop_token_ids=layout.spec.eos_token_ids,
        seed=1000 + options.seed,
    )
    clock = clock_of(options, layout.device)
    return Bench(
        config=config,
        texts=tuple(texts),
        scale=scale,
        seed=options.seed,
        cost=cost_of(options),
        clock=clock,
    )


def _config(options: ControlOptions, prompts: Sequence[Prompt], max_tokens: int) -> EngineConfig:
    """Returns a config with enough pages that no draft is shortened."""
    ceiling = options.max_draft_tokens
    longest = _longest(prompts) + max_tokens + chain_length(ceiling)
    return EngineConfig(
        model=model_config_of(options),
        cache=CacheConfig(
            page_size=PAGE_SIZE,
            num_pages=(_MAX_RUNNING + 1) * (longest // PAGE_SIZE + 2),
            prefix_caching=False,
            kv_cache_dtype=options.kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(max_running=_MAX_RUNNING, max_waiting=1 << 20),
        speculation=SpeculationConfig(
            max_draft_tokens=ceiling,
            fixed_length=ceiling,
            seed=options.seed,
            prompt_lookup=False,  # judged are the rules that stop the exit head
        ),
        parallel=ParallelConfig(num_threads=options.threads),
    )


def _longest(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.tokens) for prompt in prompts)


def _settings(options: ControlOptions, bench: Bench, traces: TraceSet | None) -> dict[str, object]:
    return {
        "quick": options.quick,
        "only": options.only,
        "texts": len(bench.texts),
        "max_tokens": bench.texts[0].max_tokens,
        "temperatures": options.temperatures,
        "max_draft_tokens": bench.ceiling,
        "dtype": layout_of(bench.config).dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "threads": options.threads,
        "clock": options.clock,
        "recorded_positions": sum(len(trace) for trace in traces.traces) if traces else 0,
    }
