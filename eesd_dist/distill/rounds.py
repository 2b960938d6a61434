"""Takes prompts through an engine with a head, and keeps what became of every round.

Used to calibrate, to judge and to compare heads; which controller drafts, and what the outcomes
mean, is up to the caller.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

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
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.core import EngineCore
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import (
    Outcome,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)

MAX_DRAFT_TOKENS = 8
_BATCH = 16
_PAGE_SIZE = 32
_NO_PROFILE = CostModel(draft_step_s=1.0, verify_s=(1.0,))
"""Drafts of one fixed length ask nobody what they cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One text to be written."""

    prompt: Prompt
    temperature: float
    seed: int


@dataclass(slots=True, kw_only=True)
class Ran:
    """The text, and its rounds in order."""

    asked: Asked
    tokens: list[TokenId] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A target, one of its heads, and how they are computed."""

    model: Path
    head: Path
    dtype: DType = "bfloat16"
    numerics: Numerics = "invariant"
    threads: int = 1


def drafting_engine(machine: Machine, *, max_length: int) -> EngineCore:
    """Every round drafts to the full length and says what the head thought of each token."""
    return build_local_engine(
        _config(
            machine,
            max_length=max_length,
            batch=_BATCH,
            speculation=SpeculationConfig(
                controller="fixed",
                max_draft_tokens=MAX_DRAFT_TOKENS,
                fixed_length=MAX_DRAFT_TOKENS,
                log_evidence=True,
            ),
        ),
        cost=_NO_PROFILE,
    )


def serving_engine(machine: Machine, *, max_length: int) -> EngineCore:
    """One request at a time under the default controller, with costs measured at the start."""
    speculation = SpeculationConfig(max_draft_tokens=MAX_DRAFT_TOKENS)
    return build_local_engine(
        _config(machine, max_length=max_length, batch=1, speculation=speculation),
        book=BeliefBook(),
    )


def run_rounds(
    engine: EngineCore,
    asked: Sequence[Asked],
    *,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    title: str,
) -> list[Ran]:
    """All texts, a batch at a time; in the order asked."""
    ran = {request_id_of(title, number): Ran(asked=one) for number, one in enumerate(asked)}
    waiting = [
        request_of(request_id, one.asked, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        for request_id, one in ran.items()
    ]
    with tqdm(total=len(asked), desc=title, unit="text", file=sys.stderr, disable=None) as bar:
        for first in range(0, len(waiting), _BATCH):
            for request in waiting[first : first + _BATCH]:
                engine.add(request)
            while engine.has_work:
                result = engine.step(wait_s=0.0)
                for outcome in result.outcomes:
                    ran[outcome.request_id].outcomes.append(outcome)
                for emission in result.emissions:
                    ran[emission.request_id].tokens.extend(emission.tokens)
                bar.update(len(result.finished))
    return list(ran.values())


def request_id_of(title: str, number: int) -> RequestId:
    return RequestId(f"{title}-{number}")


def request_of(
    request_id: RequestId,
    asked: Asked,
    *,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    speculation: SpeculationParams = SpeculationParams(),
) -> Request:
    return Request(
        request_id=request_id,
        prompt=asked.prompt.tokens,
        sampling=SamplingParams(
            temperature=asked.temperature,
            seed=asked.seed,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        ),
        speculation=speculation,
        workload=asked.prompt.workload,
    )


def _config(
    machine: Machine, *, max_length: int, batch: int, speculation: SpeculationConfig
) -> EngineConfig:
    pages_each = -(-(max_length + MAX_DRAFT_TOKENS) // _PAGE_SIZE) + 1
    return EngineConfig(
        model=ModelConfig(
            path=machine.model, head=machine.head, dtype=machine.dtype, numerics=machine.numerics
        ),
        cache=CacheConfig(page_size=_PAGE_SIZE, num_pages=batch * pages_each, prefix_caching=False),
        scheduler=SchedulerConfig(max_running=batch),
        speculation=speculation,
        parallel=ParallelConfig(num_threads=machine.threads),
    )
