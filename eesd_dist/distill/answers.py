"""Answers prompts, and plays the rounds of a head that drafts to the full length over the answers.

Calibration and evaluation use the outcomes: judged and accepted tokens, and the head's evidence.
The target writes plainly, wherever it runs; the head is in this process (`head_alone`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from eesd_dist.config import DType, EngineConfig, ModelConfig, SpeculationConfig
from eesd_dist.distill.compare import Judged, judge_text
from eesd_dist.distill.executor import Executor
from eesd_dist.distill.head_alone import HeadAlone, rounds_of
from eesd_dist.distill.sources import TextRows, engine_config
from eesd_dist.distill.train.losses import DraftVocabulary
from eesd_dist.model.spec import ModelSpec
from eesd_dist.progress import progress_bar
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import (
    FeatureSpec,
    Outcome,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
)

MAX_DRAFT_TOKENS = 8
_BATCH = 16
_TOP_K = 256
"""Best tokens of the target, with which a head's distribution is compared."""
_PLAIN = SpeculationConfig(max_draft_tokens=0)


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
class Query:
    """A text to generate."""

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
        features: FeatureSpec | None = None,
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
            features=features,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A text, the outcomes of its rounds in order, and how like the target's the head's
    distributions are over it."""

    query: Query
    tokens: Sequence[int]
    outcomes: Sequence[Outcome]
    judged: Judged


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
    spec = ModelSpec.from_folder(machine.model)
    max_length = longest(prompts) + max_tokens
    source = executor.rows(machine.engine(_PLAIN, batch=_BATCH, max_length=max_length))
    head = HeadAlone(machine.model, machine.head, dtype=machine.dtype, max_length=max_length)
    vocabulary = DraftVocabulary(head.vocab_ids, vocab_size=spec.vocab_size)
    features = FeatureSpec(exits=(head.exit_layer,), top_k=min(_TOP_K, spec.vocab_size))
    queries = [
        Query(prompt=prompt, temperature=temperature, seed=seed + number)
        for temperature in temperatures
        for number, prompt in enumerate(prompts)
    ]
    requests = [
        query.request(
            f"{title}-{number}",
            max_tokens=max_tokens,
            stop_token_ids=spec.eos_token_ids,
            mode="off",
            features=features,
        )
        for number, query in enumerate(queries)
    ]
    answers: list[Answer] = []
    with progress_bar(total=len(queries), title=title, unit="text") as bar:
        for first in range(0, len(queries), _BATCH):
            some = requests[first : first + _BATCH]
            answers += [
                _answered(query, request, text, head, vocabulary)
                for query, request, text in zip(
                    queries[first : first + _BATCH], some, source.rows_of(some), strict=True
                )
            ]
            bar.update(len(some))
    return answers


def _answered(
    query: Query, request: Request, text: TextRows, head: HeadAlone, vocabulary: DraftVocabulary
) -> Answer:
    guesses = head.guesses(text, request)
    return Answer(
        query=query,
        tokens=text.tokens[len(request.prompt) :],
        outcomes=rounds_of(guesses, text, request, draft_length=MAX_DRAFT_TOKENS),
        judged=judge_text(
            guesses.logits_GV,
            text,
            num_prompt=len(request.prompt),
            temperature=query.temperature,
            vocabulary=vocabulary,
        ),
    )


def longest(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.tokens) for prompt in prompts)
