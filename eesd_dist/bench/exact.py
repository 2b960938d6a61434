"""`eesd bench exact`: compares speculation with plain decoding on the same stages, token by token.

Tree shapes alternate: each controller is run with each shape under every sampling, in one of the
three batch sizes.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

from msgspec import structs

from eesd_dist.bench.options import ExactOptions, Topology
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KvCacheDType,
    ModelConfig,
    Numerics,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import Generation, LocalEngine
from eesd_dist.text.prompts import Prompt, load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import (
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TreeShape,
)

SHAPES: tuple[TreeShape, ...] = get_args(TreeShape)
BATCHES = (1, 4, 16)
SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "t0.7": SamplingParams(temperature=0.7),
    "t1.0 top_p": SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        min_tokens=8,
    ),
    "logit_bias": SamplingParams(temperature=0.6, top_k=50, logit_bias=((20, 4.0), (300, -100.0))),
}


class Runner(Protocol):
    """Runs requests to their end: an engine in this process, or actors."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]: ...


class PlacedRunner(Runner, Protocol):
    """A runner on actors, which reports their hosts."""

    def hosts(self) -> Sequence[str]:
        """Returns the host of each rank."""
        ...


Actors = Callable[[EngineConfig], AbstractContextManager[PlacedRunner]]
"""Context manager that starts and ends the actors of one engine."""


HERE = (
    Topology(verify_ranks=1),
    Topology(verify_ranks=2),
    Topology(verify_ranks=1, draft_ranks=2),
    Topology(verify_ranks=2, draft_ranks=2),
)
ACROSS = (*HERE, Topology(verify_ranks=4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    verify_ranks: int
    """0: both stages in this process."""
    draft_ranks: int = 1
    dtype: DType
    numerics: Numerics

    @property
    def is_promised(self) -> bool:
        """True if a mismatch is a bug; `fast` numerics do not guarantee equal texts."""
        return self.numerics == "invariant"

    @property
    def label(self) -> str:
        where = f"actors, verify TP {self.verify_ranks}" if self.verify_ranks else "one process"
        draft = f", draft TP {self.draft_ranks}" if self.draft_ranks > 1 else ""
        return f"{where}{draft}, {self.dtype}, {self.numerics}"


@dataclass(slots=True, kw_only=True)
class ExactTally:
    tokens: int = 0
    mismatches: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, plain: Generation, speculative: Generation) -> None:
        longest = max(len(plain.tokens), len(speculative.tokens))
        self.tokens += longest
        self.mismatches += sum(
            a != b
            for a, b in itertools.zip_longest(plain.tokens, speculative.tokens, fillvalue=None)
        )
        self.drafted += sum(speculative.drafted)
        self.accepted += sum(speculative.accepted)

    def add_all(self, other: "ExactTally") -> None:
        self.tokens += other.tokens
        self.mismatches += other.mismatches
        self.drafted += other.drafted
        self.accepted += other.accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Results of one runner."""

    by_shape: dict[TreeShape, ExactTally]

    @property
    def total(self) -> ExactTally:
        total = ExactTally()
        for tally in self.by_shape.values():
            total.add_all(tally)
        return total


def engine_config(
    model: Path, head: Path | None, case: Case, *, kv_cache_dtype: KvCacheDType = "auto"
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=model, head=head, dtype=case.dtype, numerics=case.numerics),
        cache=CacheConfig(num_pages=256, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_running=16),
        speculation=SpeculationConfig(max_draft_tokens=6),
        parallel=ParallelConfig(
            verify_tensor_parallel_size=max(1, case.verify_ranks),
            draft_tensor_parallel_size=case.draft_ranks,
            timeout_s=45.0,
        ),
    )


def _requests(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    speculation: SpeculationParams,
    *,
    batch: int,
    max_tokens: int,
    tag: str,
    stop_token_ids: tuple[int, ...],
) -> list[Request]:
    chosen = itertools.islice(itertools.cycle(prompts), batch)
    return [
        Request(
            request_id=RequestId(f"{tag}-{i}"),
            prompt=prompt.tokens,
            sampling=structs.replace(
                sampling, seed=1000 + i, max_tokens=max_tokens, stop_token_ids=stop_token_ids
            ),
            speculation=speculation,
            workload=prompt.workload,
        )
        for i, prompt in enumerate(chosen)
    ]


def compare(
    runner: Runner,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    report: Say,
    label: str,
    finished: Callable[[ExactTally], None] = lambda _: None,
) -> Comparison:
    """Compares all controllers, samplings and batch sizes on one runner, with alternating shapes.
    `finished` is called after each sampling in each batch size."""
    by_shape = {shape: ExactTally() for shape in SHAPES}
    settings = itertools.product(enumerate(SAMPLING.items()), enumerate(BATCHES))
    for (first, (name, sampling)), (second, batch) in settings:
        per_request = max(4, max_tokens // batch)
        plain = runner.generate(
            _requests(
                prompts,
                sampling,
                SpeculationParams(mode="off"),
                batch=batch,
                max_tokens=per_request,
                tag=f"plain-{name}-{batch}",
                stop_token_ids=stop_token_ids,
            )
        )
        group = ExactTally()
        for third, controller in enumerate(CONTROLLER_NAMES):
            shape = SHAPES[(first + second + third) % len(SHAPES)]
            speculative = runner.generate(
                _requests(
                    prompts,
                    sampling,
                    SpeculationParams(controller=controller, tree=shape),
                    batch=batch,
                    max_tokens=per_request,
                    tag=f"{controller}-{shape}-{name}-{batch}",
                    stop_token_ids=stop_token_ids,
                )
            )
            tally = ExactTally()
            for a, b in zip(plain, speculative, strict=True):
                tally.add(a, b)
            if tally.mismatches:
                what = f"{controller}, tree {shape}, {name}, batch {batch}"
                report(f"  {label} {what}: {tally.mismatches} differ")
            by_shape[shape].add_all(tally)
            group.add_all(tally)
        finished(group)
    return Comparison(by_shape=by_shape)


class Progress:
    """Progress of a run, with an estimate of the remaining time from the rate so far."""

    def __init__(
        self,
        *,
        num_groups: int,
        report: Say,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_groups = num_groups
        self._report = report
        self._clock = clock
        self._started_s = clock()
        self._done = 0
        self._total = ExactTally()

    def finished(self, group: ExactTally) -> None:
        """Reports one sampling in one batch size, under every controller."""
        self._done += 1
        self._total.add_all(group)
        spent_s = self._clock() - self._started_s
        left_s = spent_s / self._done * (self._num_groups - self._done)
        self._report(
            f"  {self._done}/{self._num_groups} settings, {self._total.tokens} tokens, "
            f"{self._total.mismatches} differ, about {duration(left_s)} left"
        )


def duration(seconds: float) -> str:
    """Formats seconds as `45 s`, `12 min` or `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def cases_of(topologies: Sequence[Topology], *, in_process: bool) -> tuple[Case, ...]:
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    cases: list[Case] = []
    for dtype in dtypes:
        if in_process:
            cases.append(Case(verify_ranks=0, dtype=dtype, numerics="invariant"))
        cases += [
            Case(
                verify_ranks=topology.verify_ranks,
                draft_ranks=topology.draft_ranks,
                dtype=dtype,
                numerics="invariant",
            )
            for topology in topologies
        ]
    if in_process:
        cases.append(Case(verify_ranks=0, dtype="bfloat16", numerics="fast"))
    return tuple(cases)


@contextmanager
def _runner_of(case: Case, config: EngineConfig, actors: Actors) -> Iterator[tuple[Runner, int]]:
    """Runs the engine of a case: actors, or both stages in this process. Yields it with the number
    of its hosts."""
    if case.verify_ranks:
        with actors(config) as actor_runner:
            yield actor_runner, len(set(actor_runner.hosts()))
    else:
        with closing(LocalEngine(config)) as engine:
            yield engine, 1


def run(options: ExactOptions, *, actors: Actors, is_cluster: bool) -> int:
    """Runs the comparison and returns the exit status. `is_cluster`: the actors run in a cluster,
    and no case runs in this process."""
    say = say_unless(options.json)
    prompts = load_prompts(Tokenizer.load(options.model), options.prompts)
    topologies = options.topology or (ACROSS if is_cluster else HERE)
    cases = cases_of(topologies, in_process=not is_cluster)
    compared = len(cases) * len(CONTROLLER_NAMES) * len(SAMPLING) * len(BATCHES)
    # Some texts end before `max_tokens`: a third is added to reach the number of tokens.
    max_tokens = max(8, round(1.33 * options.tokens / compared))
    progress = Progress(num_groups=len(cases) * len(SAMPLING) * len(BATCHES), report=say)
    rows = []
    for case in cases:
        config = engine_config(
            options.model, options.head, case, kv_cache_dtype=options.kv_cache_dtype
        )
        started = time.perf_counter()
        with _runner_of(case, config, actors) as (runner, num_hosts):
            comparison = compare(
                runner,
                prompts,
                max_tokens=max_tokens,
                stop_token_ids=layout_of(config).spec.eos_token_ids,
                report=say,
                label=case.label,
                finished=progress.finished,
            )
        tally = comparison.total
        row = dataclasses.asdict(case) | dataclasses.asdict(tally)
        row |= dataclasses.asdict(comparison) | {"num_hosts": num_hosts}
        rows.append(row | {"seconds": round(time.perf_counter() - started, 1)})
        where = f" on {num_hosts} hosts" if num_hosts > 1 else ""
        say(f"{case.label:42} {tally.tokens:7} tokens, {tally.mismatches} differ{where}")
    promised = [row for case, row in zip(cases, rows, strict=True) if case.is_promised]
    free = [row for case, row in zip(cases, rows, strict=True) if not case.is_promised]
    report = {
        "tokens": sum(row["tokens"] for row in promised),
        "mismatches": sum(row["mismatches"] for row in promised),
        "fast": {
            "tokens": sum(row["tokens"] for row in free),
            "mismatches": sum(row["mismatches"] for row in free),
        },
        "kv_cache_dtype": options.kv_cache_dtype,
        "cases": rows,
    }
    print_report(report, seed=1000)
    return 1 if report["mismatches"] else 0
