"""Texts in two hundred schemas and forty expressions match them, with and without speculation.

Each text is checked by another library than the one that constrained it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import pytest
from jsonschema import Draft202012Validator

from eesd_dist.bench.options import SHIPPED_PROMPTS
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from eesd_dist.engine.local import Generation, LocalEngine
from eesd_dist.text import Tokenizer
from eesd_dist.text.grammars import GrammarCompiler, json_schema, masks_along, regular_expression
from eesd_dist.text.prompts import load_prompts
from eesd_dist.types import (
    Device,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
)
from tests.unit.text.grammar_corpus import REGEXES, Schema, schemas

TEMPERATURES = (0.0, 0.7, 1.0)
LONGEST_PROMPT, MAX_TOKENS, BATCH, PAGE_SIZE = 160, 300, 16, 32


@dataclass(frozen=True, slots=True)
class Case:
    """A grammar of the corpus."""

    grammar: str
    schema: Schema | None = None
    pattern: str = ""

    def matches(self, text: str) -> bool:
        """Judges a whole text without the library that constrained it."""
        if self.schema is None:
            return re.fullmatch(self.pattern, text) is not None
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return bool(Draft202012Validator(self.schema).is_valid(value))


CASES = [
    *(Case(json_schema(schema), schema=schema) for schema in schemas()),
    *(Case(regular_expression(pattern), pattern=pattern) for pattern in REGEXES),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer)


@contextmanager
def corpus_engine(device: Device, grammars: GrammarCompiler) -> Iterator[LocalEngine]:
    pages = BATCH * -(-(LONGEST_PROMPT + MAX_TOKENS + 16) // PAGE_SIZE)
    engine = LocalEngine(
        EngineConfig(
            model=ModelConfig(path=BUNDLED_MODEL, device=device),
            cache=CacheConfig(page_size=PAGE_SIZE, num_pages=pages, prefix_caching=False),
            scheduler=SchedulerConfig(max_running=BATCH),
        ),
        grammars=grammars,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, grammars: GrammarCompiler) -> Iterator[LocalEngine]:
    with corpus_engine(request.param, grammars) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Request]:
    prompts = [
        prompt.tokens
        for prompt in load_prompts(tokenizer, SHIPPED_PROMPTS)
        if len(prompt.tokens) <= LONGEST_PROMPT
    ]
    return [
        Request(
            request_id=RequestId(f"corpus-{number}"),
            prompt=prompt,
            sampling=SamplingParams(
                temperature=TEMPERATURES[number % len(TEMPERATURES)],
                seed=number,
                max_tokens=MAX_TOKENS,
                stop_token_ids=tokenizer.eos_token_ids,
                grammar=case.grammar,
            ),
            speculation=SpeculationParams(mode="off"),
        )
        for number, (case, prompt) in enumerate(zip(CASES, cycle(prompts), strict=False))
    ]


@pytest.fixture(scope="module")
def plain(engine: LocalEngine, requests: Sequence[Request]) -> list[Generation]:
    return engine.generate(requests)


@pytest.mark.timeout(1200)
def test_every_text_matches_or_begins_one_that_does(
    plain: Sequence[Generation], tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    num_ended = 0
    for case, generation in zip(CASES, plain, strict=True):
        if generation.finish_reason is FinishReason.STOP:
            num_ended += 1
            assert case.matches(tokenizer.decode(generation.tokens)), case.grammar
        else:
            masks = masks_along(grammars.matcher(case.grammar), generation.tokens)
            assert len(masks) == len(generation.tokens) + 1, case.grammar
    assert num_ended > 200


@pytest.mark.timeout(1200)
def test_speculation_changes_no_text(
    engine: LocalEngine, requests: Sequence[Request], plain: Sequence[Generation]
) -> None:
    drafted = engine.generate(
        [
            Request(
                request_id=RequestId(f"{request.request_id} drafted"),
                prompt=request.prompt,
                sampling=request.sampling,
            )
            for request in requests
        ]
    )
    for case, expected, actual in zip(CASES, plain, drafted, strict=True):
        assert (expected.tokens, expected.finish_reason) == (actual.tokens, actual.finish_reason), (
            case.grammar
        )
    assert sum(sum(generation.accepted) for generation in drafted) > 1000
