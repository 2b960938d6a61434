"""Answers prompts with a head that drafts to the full length in every round.

Calibration and evaluation use the outcomes: judged and accepted tokens, and the head's evidence.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tqdm import tqdm

from eesd_dist.config import DType, EngineConfig, ModelConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.distill.executor import Executor
from eesd_dist.distill.writer import engine_config
from eesd_dist.model.spec import ModelSpec
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
_FULL_DRAFTS = SpeculationConfig(
    controller="fixed",
    max_draft_tokens=MAX_DRAFT_TOKENS,
    fixed_length=MAX_DRAFT_TOKENS,
    log_evidence=True,
)
_NO_PROFILE = CostModel(draft_step_s=1.0, verify_s=(1.0,))
"""Drafts of fixed length do not depend on cost, so that it is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A target, one of its heads, and the settings of their computation."""

    model: Annotated[Path, "folder of the target (the bundled one)"]
    head: Annotated[Path, "folder of the exit head"]
    dtype: Annotated[DType, "type of weights and activations"] = "bfloat16"
    threads: Annotated[int, "CPU threads"] = 1

    def engine(
        self, speculation: SpeculationConfig, *, batch: int, max_length: int
    ) -> EngineConfig:
        return engine_config(
            ModelConfig(path=self.model, head=self.head, dtype=self.dtype, numerics="invariant"),
            speculation,
            batch=batch,
            max_length=max_length,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One text to generate."""

    prompt: Prompt
    temperature: float
    seed: int

    def request(
        self,
        name: str,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        mode: Literal["off", "auto"] = "auto",
    ) -> Request:
        return Request(
            request_id=RequestId(name),
            prompt=self.prompt.tokens,
            sampling=SamplingParams(
                temperature=self.temperature,
                seed=self.seed,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
            ),
            speculation=SpeculationParams(mode=mode),
            workload=self.prompt.workload,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A text, and the outcomes of its rounds in order."""

    asked: Asked
    tokens: Sequence[TokenId]
    outcomes: Sequence[Outcome]


def answer(
    executor: Executor,
    machine: Machine,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    title: str,
) -> list[Answer]:
    """Answers every prompt at every temperature; `title` names progress bar and requests."""
    stop_token_ids = ModelSpec.from_folder(machine.model).eos_token_ids
    max_length = longest(prompts) + max_tokens
    config = machine.engine(_FULL_DRAFTS, batch=_BATCH, max_length=max_length)
    writer = executor.writer(config, cost=_NO_PROFILE)
    asked = [
        Asked(prompt=prompt, temperature=temperature, seed=seed + number)
        for temperature in temperatures
        for number, prompt in enumerate(prompts)
    ]
    requests = [
        one.request(f"{title}-{number}", max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        for number, one in enumerate(asked)
    ]
    answers: list[Answer] = []
    with tqdm(total=len(asked), desc=title, unit="text", file=sys.stderr, disable=None) as bar:
        for first in range(0, len(asked), _BATCH):
            written = writer.write(requests[first : first + _BATCH])
            answers += [
                Answer(asked=one, tokens=text.tokens, outcomes=text.outcomes)
                for one, text in zip(asked[first:], written, strict=False)
            ]
            bar.update(len(written))
    return answers


def longest(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.tokens) for prompt in prompts)
