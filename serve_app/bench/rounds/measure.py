"""Where the time of a round goes: requests, statistics and tables of `eesd bench rounds`.

Only rounds without prefill in which every request of the batch is running are counted.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Overlap,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.local import Generation
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import Prompt, load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import (
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from serve_app.bench.options import RoundsOptions

BATCHES = (1, 4, 8)
QUICK_BATCHES = (1, 4)
COLUMNS = ("plan", "draft", "transfer", "verify", "collectives", "commit", "other")
_FIXED_LENGTH = 4


class Runner(Protocol):
    """A service that runs requests to their ends and returns its rounds."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]: ...
    def rounds(self) -> Sequence[RoundStats]:
        """The latest ones, oldest first."""
        ...


Actors = Callable[[Mapping[str, EngineConfig]], AbstractContextManager[Mapping[str, Runner]]]
"""Starts one service for each engine, at the same time, and ends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    overlap: Overlap

    @property
    def name(self) -> str:
        return {False: "1 microbatch", True: "2 microbatches", "auto": "auto"}[self.overlap]


QUICK_VARIANTS = tuple(Variant(overlap=o) for o in (False, True))
VARIANTS = (*QUICK_VARIANTS, Variant(overlap="auto"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The loop's wall clock over some rounds; seconds in all."""

    num_rounds: int
    num_tokens: int
    plan: float
    draft: float
    transfer: float
    verify: float
    collectives: float
    commit: float
    other: float
    hidden: float
    """Verified while the loop did something else."""
    sent_bytes: int
    received_bytes: int
    group_bytes: int
    """Between the ranks of each stage, out and in, as their ranks 0 count them."""

    @property
    def wall(self) -> float:
        return float(sum(getattr(self, column) for column in COLUMNS))

    @property
    def overhead(self) -> float:
        """The share that is no model computation."""
        return 1.0 - (self.draft + self.verify) / self.wall if self.wall else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall if self.wall else 0.0

    def as_json(self) -> dict[str, float]:
        count = max(self.num_rounds, 1)
        row = {f"{column}_ms": 1e3 * getattr(self, column) / count for column in COLUMNS}
        row |= {"hidden_ms": 1e3 * self.hidden / count, "round_ms": 1e3 * self.wall / count}
        for name in ("sent_bytes", "received_bytes", "group_bytes"):
            row[f"{name}_per_round"] = getattr(self, name) / count
        return row | {
            "rounds": self.num_rounds,
            "tokens": self.num_tokens,
            "rounds_per_s": self.num_rounds / self.wall if self.wall else 0.0,
            "tokens_per_s": self.tokens_per_s,
            "overhead": self.overhead,
        }


def split_of(rounds: Sequence[RoundStats]) -> Split:
    """Adds rounds up; the wait for a verdict is transfer first, then what the verify ranks did."""
    draft = transfer = verify = collectives = hidden = 0.0
    for stats in rounds:
        on_the_way = min(stats.transfer_s, stats.waited_s)
        seen = stats.waited_s - on_the_way
        waiting = min(stats.collective_s / stats.verify_s, 1.0) if stats.verify_s else 0.0
        for_draft_ranks = min(stats.draft_group.wait_s, stats.draft_s)
        draft += stats.draft_s - for_draft_ranks
        transfer += on_the_way
        collectives += seen * waiting + for_draft_ranks
        verify += seen * (1.0 - waiting)
        hidden += max(stats.verify_s - seen, 0.0)
    groups = [group for stats in rounds for group in (stats.verify_group, stats.draft_group)]
    return Split(
        num_rounds=len(rounds),
        num_tokens=sum(stats.num_emitted for stats in rounds),
        plan=sum(stats.plan_s for stats in rounds),
        draft=draft,
        transfer=transfer,
        verify=verify,
        collectives=collectives,
        commit=sum(stats.commit_s for stats in rounds),
        other=sum(stats.other_s for stats in rounds),
        hidden=hidden,
        sent_bytes=sum(stats.sent_bytes for stats in rounds),
        received_bytes=sum(stats.received_bytes for stats in rounds),
        group_bytes=sum(group.sent_bytes + group.received_bytes for group in groups),
    )


def steady(rounds: Sequence[RoundStats]) -> list[RoundStats]:
    """Returns the rounds without prefill from the last arrival to the first end of a request."""
    decoding = [stats for stats in rounds if stats.num_prefill_rows == 0]
    first: dict[RequestId, int] = {}
    last: dict[RequestId, int] = {}
    for number, stats in enumerate(decoding):
        for request_id in stats.request_ids:
            first.setdefault(request_id, number)
            last[request_id] = number
    if not first:
        return []
    return decoding[max(first.values()) : min(last.values()) + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSetting:
    """One row of the report, for any variant."""

    batch: int
    drafting: bool

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {'drafting' if self.drafting else 'plain'}"


Splits = dict[tuple[RoundsSetting, Variant], list[Split]]
"""One for each repeat."""


@dataclass(slots=True, kw_only=True)
class Measured:
    splits: Splits
    texts_changed: int = 0


class Bench:
    """The same requests through every variant in turn."""

    def __init__(
        self,
        runners: Mapping[Variant, Runner],
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        controller: str,
    ) -> None:
        self._runners = runners
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._controller = controller
        self._last: dict[Variant, int] = dict.fromkeys(runners, 0)
        """The last round of each that has been looked at."""
        self._num_asked = 0

    def run(self, settings: Sequence[RoundsSetting], *, repeats: int, say: Say) -> Measured:
        measured = Measured(splits={})
        for variant in self._runners:
            self._one(variant, RoundsSetting(batch=1, drafting=True))  # warms it
        for repeat in range(repeats):
            for number, setting in enumerate(settings):
                texts: list[list[list[TokenId]]] = []
                for variant in _rotated(list(self._runners), repeat + number):
                    split, text = self._one(variant, setting)
                    measured.splits.setdefault((setting, variant), []).append(split)
                    texts.append(text)
                measured.texts_changed += sum(
                    a != b for text in texts[1:] for a, b in zip(text, texts[0], strict=True)
                )
            say(f"repeat {repeat + 1} of {repeats} done")
        return measured

    def _one(self, variant: Variant, setting: RoundsSetting) -> tuple[Split, list[list[TokenId]]]:
        runner = self._runners[variant]
        done = runner.generate(self._requests(setting))
        rounds = [stats for stats in runner.rounds() if stats.round_id > self._last[variant]]
        self._last[variant] = max([self._last[variant], *(stats.round_id for stats in rounds)])
        return split_of(steady(rounds)), [generation.tokens for generation in done]

    def _requests(self, setting: RoundsSetting) -> list[Request]:
        self._num_asked += 1
        speculation = SpeculationParams(mode="off")
        if setting.drafting:
            speculation = SpeculationParams(controller=self._controller)
        chosen = itertools.islice(itertools.cycle(self._prompts), setting.batch)
        return [
            Request(
                request_id=RequestId(f"rounds-{self._num_asked}-{i}"),
                prompt=prompt.tokens,
                sampling=SamplingParams(temperature=0.0, seed=i, max_tokens=self._max_tokens),
                speculation=speculation,
                workload=prompt.workload,
            )
            for i, prompt in enumerate(chosen)
        ]


def over_one_microbatch(splits: Splits, setting: RoundsSetting, variant: Variant) -> float | None:
    """Returns tokens per second relative to one microbatch: the median over all repeats."""
    one, other = splits[setting, replace(variant, overlap=False)], splits[setting, variant]
    ratios = [
        b.tokens_per_s / a.tokens_per_s
        for a, b in zip(one, other, strict=True)
        if a.tokens_per_s and b.tokens_per_s
    ]
    return statistics.median(ratios) if ratios else None


def added(splits: Sequence[Split]) -> Split:
    """Adds up all repeats."""
    total = splits[0]
    for split in splits[1:]:
        sums = {name: value + getattr(split, name) for name, value in asdict(total).items()}
        total = replace(total, **sums)
    return total


def engine_config(options: RoundsOptions, variant: Variant) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=options.model, head=options.head),
        cache=CacheConfig(num_pages=256),
        scheduler=SchedulerConfig(max_running=max(BATCHES), overlap=variant.overlap),
        speculation=SpeculationConfig(fixed_length=_FIXED_LENGTH, max_draft_tokens=8),
        parallel=ParallelConfig(
            draft_tensor_parallel_size=options.draft_tp,
            verify_tensor_parallel_size=options.verify_tp,
            timeout_s=60.0,
        ),
    )


def report_of(measured: Measured, settings: Sequence[RoundsSetting]) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for (setting, variant), splits in measured.splits.items():
        rows.append({**asdict(setting), **asdict(variant), **added(splits).as_json()})
    ratios = [
        {**asdict(setting), **asdict(variant), "over_one_microbatch": ratio}
        for setting in settings
        for variant, ratio in _ratios(measured.splits, setting)
    ]
    return {"rows": rows, "overlap": ratios, "texts_changed": measured.texts_changed}


def lines_of(measured: Measured, settings: Sequence[RoundsSetting]) -> list[str]:
    """Returns the table, in milliseconds a round."""
    heads = ("round", *COLUMNS, "hidden")
    lines = ["ms a round".ljust(42) + "".join(f"{head:>12}" for head in heads)]
    lines[0] += f"{'overhead':>10}{'rounds/s':>10}{'tokens/s':>10}"
    for setting in settings:
        for (found, variant), splits in measured.splits.items():
            if found != setting:
                continue
            row = added(splits).as_json()
            lines.append(
                f"{setting.name}, {variant.name}".ljust(42)
                + "".join(f"{row[f'{head}_ms']:12.3f}" for head in heads)
                + f"{row['overhead']:10.1%}{row['rounds_per_s']:10.1f}{row['tokens_per_s']:10.1f}"
            )
        for variant, ratio in _ratios(measured.splits, setting):
            lines.append(f"  {variant.name}, over one microbatch: {ratio:.3f} x tokens/s")
    return lines


def _ratios(splits: Splits, setting: RoundsSetting) -> Iterator[tuple[Variant, float]]:
    for found, variant in splits:
        if found == setting and variant.overlap is not False:
            ratio = over_one_microbatch(splits, setting, variant)
            if ratio is not None:
                yield variant, ratio


def run(options: RoundsOptions, *, actors: Actors) -> int:
    say = say_unless(options.json)
    prompts = load_prompts(Tokenizer.load(options.model), options.prompts)
    settings = [
        RoundsSetting(batch=batch, drafting=drafting)
        for batch in (QUICK_BATCHES if options.quick else BATCHES)
        for drafting in (False, True)
    ]
    variants = QUICK_VARIANTS if options.quick else VARIANTS
    repeats = options.repeats or (1 if options.quick else 5)
    max_tokens = options.max_tokens or (24 if options.quick else 64)
    with actors({v.name: engine_config(options, v) for v in variants}) as runners:
        bench = Bench(
            {variant: runners[variant.name] for variant in variants},
            prompts,
            max_tokens=max_tokens,
            controller=options.controller,
        )
        measured = bench.run(settings, repeats=repeats, say=say)
    for line in lines_of(measured, settings):
        say(line)
    report = report_of(measured, settings)
    report |= {"verify_tp": options.verify_tp, "draft_tp": options.draft_tp, "repeats": repeats}
    report |= {"max_tokens": max_tokens, "controller": options.controller}
    report["provenance"] = collect_provenance(seed=0).as_json()
    print_report(report)
    return 1 if measured.texts_changed else 0


def _rotated(variants: list[Variant], turn: int) -> list[Variant]:
    at = turn % len(variants)
    return variants[at:] + variants[:at]
