"""Is a single token different? Speculation on against plain decoding on the same stages.

    eesd bench exact [--tokens N] [--json]

Every controller, temperatures 0, 0.7 and 1.0 with top_p, penalties and logit_bias, batches of 1, 4
and 16, in one process and over actors with one and two verify ranks; float32, and bfloat16 with
`numerics: invariant`. What bfloat16 gives with `numerics: fast` is printed beside it. The last line
of the output is one JSON object. Exit status 1 when a promised equality fails.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Numerics,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.llm import Generation
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import (
    ControllerName,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
)

CONTROLLERS: tuple[ControllerName, ...] = ("fixed", "threshold", "beta", "calibration")
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
    """Something that takes requests to their ends: an engine here, or actors over there."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    topology: str
    dtype: DType
    numerics: Numerics
    promised: bool
    """Whether a mismatch is a bug; bfloat16 with fast numerics promises nothing."""


@dataclass(slots=True, kw_only=True)
class Tally:
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


def engine_config(
    model: Path, head: Path | None, case: Case, *, verify_ranks: int = 1
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=model, head=head, dtype=case.dtype, numerics=case.numerics),
        cache=CacheConfig(num_pages=256),
        scheduler=SchedulerConfig(max_running=16),
        speculation=SpeculationConfig(max_draft_tokens=6),
        parallel=ParallelConfig(verify_tensor_parallel_size=verify_ranks),
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
    import dataclasses

    chosen = itertools.islice(itertools.cycle(prompts), batch)
    return [
        Request(
            request_id=RequestId(f"{tag}-{i}"),
            prompt=prompt.tokens,
            sampling=dataclasses.replace(
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
    report: Callable[[str], None],
    label: str,
) -> Tally:
    """All controllers, samplings and batches on one runner."""
    total = Tally()
    for (name, sampling), batch in itertools.product(SAMPLING.items(), BATCHES):
        per_request = max(4, max_tokens // batch)
        shared = {"batch": batch, "max_tokens": per_request}
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
        for controller in CONTROLLERS:
            speculative = runner.generate(
                _requests(
                    prompts,
                    sampling,
                    SpeculationParams(controller=controller),
                    batch=shared["batch"],
                    max_tokens=shared["max_tokens"],
                    tag=f"{controller}-{name}-{batch}",
                    stop_token_ids=stop_token_ids,
                )
            )
            tally = Tally()
            for a, b in zip(plain, speculative, strict=True):
                tally.add(a, b)
            if tally.mismatches:
                report(f"  {label} {controller} {name} batch {batch}: {tally.mismatches} differ")
            total.tokens += tally.tokens
            total.mismatches += tally.mismatches
            total.drafted += tally.drafted
            total.accepted += tally.accepted
    return total
