"""Runs the corpus with speculation on and off, judges every text, and times the masks."""

import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from jsonschema import Draft202012Validator

from eesd_dist.bench.grammars.corpus import REGEXES, Schema, schemas
from eesd_dist.bench.options import GrammarsOptions
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from eesd_dist.engine.local import Generation, LocalEngine
from eesd_dist.provenance import collect_provenance
from eesd_dist.text import Tokenizer
from eesd_dist.text.grammars import (
    GrammarCompiler,
    json_schema,
    masks_along,
    regular_expression,
)
from eesd_dist.text.prompts import Prompt, load_prompts
from eesd_dist.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
)

_TEMPERATURES = (0.0, 0.7, 1.0)
_LONGEST_PROMPT = 160
_PAGE_SIZE = 32
_BATCH = 16
_NUM_TIMED = 12
_DRAFT = 4
"""Tokens drafted in the rounds for which masks are timed: as many as are usual."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One grammar of the corpus."""

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


class _Runner:
    def __init__(self, options: GrammarsOptions) -> None:
        self.tokenizer = Tokenizer.load(options.model)
        self.grammars = GrammarCompiler(lambda: self.tokenizer)
        self._max_tokens = options.max_tokens
        pages = _BATCH * -(-(_LONGEST_PROMPT + options.max_tokens + 16) // _PAGE_SIZE)
        self._engine = LocalEngine(
            EngineConfig(
                model=ModelConfig(path=options.model, device=options.device),
                cache=CacheConfig(page_size=_PAGE_SIZE, num_pages=pages, prefix_caching=False),
                scheduler=SchedulerConfig(max_running=_BATCH),
            ),
            grammars=self.grammars,
        )
        found = load_prompts(self.tokenizer, options.prompts)
        self._prompts = [each for each in found if len(each.tokens) <= _LONGEST_PROMPT]

    def requests(
        self, grammars: Sequence[str | None], *, mode: str, lengths: Sequence[int] | None = None
    ) -> list[Request]:
        """`lengths`: of texts that do not end before."""
        prompts = itertools.cycle(self._prompts)
        return [
            self._request(at, next(prompts), grammar, mode, lengths)
            for at, grammar in enumerate(grammars)
        ]

    def _request(
        self,
        at: int,
        prompt: Prompt,
        grammar: str | None,
        mode: str,
        lengths: Sequence[int] | None,
    ) -> Request:
        return Request(
            request_id=RequestId(f"{mode} {at}"),
            prompt=prompt.tokens,
            sampling=SamplingParams(
                temperature=_TEMPERATURES[at % len(_TEMPERATURES)],
                seed=at,
                max_tokens=self._max_tokens if lengths is None else lengths[at],
                stop_token_ids=self.tokenizer.eos_token_ids if lengths is None else (),
                grammar=grammar,
            ),
            speculation=SpeculationParams(mode="off" if mode == "off" else "auto"),
        )

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return self._engine.generate(requests)

    def text_of(self, generation: Generation) -> str:
        return self.tokenizer.decode(generation.tokens)

    def is_prefix(self, grammar: str, generation: Generation) -> bool:
        masks = masks_along(self.grammars.matcher(grammar), generation.tokens)
        return len(masks) == len(generation.tokens) + 1


def judge(runner: _Runner, cases: Sequence[_Case], *, say: Say) -> tuple[dict[str, Any], list[int]]:
    """Returns the verdict on the corpus, and the number of tokens of each text."""
    grammars = [case.grammar for case in cases]
    plain = runner.generate(runner.requests(grammars, mode="off"))
    drafted = runner.generate(runner.requests(grammars, mode="auto"))
    ended = [generation.finish_reason is FinishReason.STOP for generation in plain]
    wrong = [
        at
        for at, (case, generation) in enumerate(zip(cases, plain, strict=True))
        if (
            not case.matches(runner.text_of(generation))
            if ended[at]
            else not runner.is_prefix(case.grammar, generation)
        )
    ]
    for at in wrong:
        say(f"does not match: {grammars[at][:200]} found {runner.text_of(plain[at])!r}")
    different = [
        at
        for at, (one, other) in enumerate(zip(plain, drafted, strict=True))
        if one.tokens != other.tokens or one.finish_reason is not other.finish_reason
    ]
    verdict = {
        "grammars": len(cases),
        "ended": sum(ended),
        "do_not_match": len(wrong),
        "differ_with_speculation": len(different),
        "tokens": sum(len(generation.tokens) for generation in plain),
        "accepted_per_drafted": _acceptance(drafted),
    }
    say(f"{verdict}")
    return verdict, [len(generation.tokens) for generation in plain]


def times(
    runner: _Runner, cases: Sequence[_Case], lengths: Sequence[int], *, say: Say
) -> dict[str, Any]:
    """Times the longest texts one at a time, with their grammars and without, and their masks."""
    longest = sorted(range(len(cases)), key=lambda at: -lengths[at])[:_NUM_TIMED]
    grammars = [cases[at].grammar for at in longest]
    counts = [lengths[at] for at in longest]
    found: dict[str, Any] = {}
    for name, used, wanted in (("grammar", grammars, None), ("none", [None] * len(counts), counts)):
        for mode in ("off", "auto"):
            requests = runner.requests(used, mode=mode, lengths=wanted)
            runner.generate(requests[:1])
            started = time.perf_counter()
            generations = [runner.generate([request])[0] for request in requests]
            took_s = time.perf_counter() - started
            num_tokens = sum(len(generation.tokens) for generation in generations)
            found[f"{name}, {mode}"] = {
                "tokens_per_s": round(num_tokens / took_s, 1),
                "accepted_per_drafted": _acceptance(generations),
            }
            say(f"{name}, speculation {mode}: {found[f'{name}, {mode}']}")
            if name == "grammar" and mode == "off":
                texts = generations
    found["mask_us_per_round"] = _mask_us(runner, grammars, texts)
    say(f"masks of a round with {_DRAFT} drafted tokens: {found['mask_us_per_round']} us")
    return found


def _mask_us(
    runner: _Runner, grammars: Sequence[str], texts: Sequence[Generation]
) -> dict[str, float]:
    """Returns the time of a round's masks, when all drafted tokens are right."""
    took_s: list[float] = []
    for grammar, text in zip(grammars, texts, strict=True):
        matcher = runner.grammars.matcher(grammar)
        for at in range(0, len(text.tokens), _DRAFT + 1):
            started = time.perf_counter()
            matcher.read(text.tokens[:at])
            for depth in range(_DRAFT + 1):
                matcher.mask_after(text.tokens[at : at + depth])
            took_s.append(time.perf_counter() - started)
    ordered = sorted(took_s)
    return {
        "mean": round(1e6 * mean(took_s), 1),
        "p50": round(1e6 * ordered[len(ordered) // 2], 1),
        "p99": round(1e6 * ordered[len(ordered) * 99 // 100], 1),
    }


def _acceptance(generations: Sequence[Generation]) -> float | None:
    num_drafted = sum(sum(generation.drafted) for generation in generations)
    num_accepted = sum(sum(generation.accepted) for generation in generations)
    return round(num_accepted / num_drafted, 3) if num_drafted else None


@torch.inference_mode()
def main(options: GrammarsOptions) -> int:
    """Prints the report; returns 1 if a text does not match or differs."""
    say = say_unless(options.json)
    torch.set_num_threads(1)
    cases = [
        *(_Case(json_schema(schema), schema=schema) for schema in schemas()),
        *(_Case(regular_expression(pattern), pattern=pattern) for pattern in REGEXES),
    ]
    runner = _Runner(options)
    verdict, lengths = judge(runner, cases, say=say)
    report = verdict | {"times": times(runner, cases, lengths, say=say)}
    report["provenance"] = collect_provenance().as_json()
    print_report(report)
    return 1 if verdict["do_not_match"] or verdict["differ_with_speculation"] else 0
