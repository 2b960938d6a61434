"""`eesd bench batch`: tokens per second of many requests at once, in one process.

Requests of one batch start together and end after the same number of tokens. Plain decoding,
speculation, prompt lookup alone, transformers' batched generation in its fastest type and a running
service take turns on the same weights and prompts. Seconds are those from the start of a batch to
its end, prompts included.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any
from uuid import uuid4

import torch

from eesd_dist.backends.api import engine_on
from eesd_dist.bench.best_fixed import PromptTimes, over_other
from eesd_dist.bench.load_client import ask_all, model_served_at
from eesd_dist.bench.options import BatchedOptions
from eesd_dist.bench.output import print_report, say_unless
from eesd_dist.bench.transformers_model import fastest_transformers_model
from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.llm.sampling_params import SamplingParams as TextParams
from eesd_dist.text.prompts import Prompt, load_prompts, prompts_of_context
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams

Generate = Callable[[Sequence[Prompt]], list[list[int]]]
"""Prompts -> the new tokens of each."""

_PAGE_SIZE = 32
_SERVED = {"service plain": "plain", "service speculation": "speculation"}
"""Variants of a service, and those of the engine in this process that they are compared with."""


def main(options: BatchedOptions) -> None:
    """Prints a table and the report."""
    say = say_unless(options.json)
    torch.set_num_threads(1)
    prompts = load_prompts(Tokenizer.load(options.model), options.prompts)
    if options.prompt_tokens is not None:
        if options.prompt_tokens < 1:
            raise ConfigError(f"--prompt-tokens: found {options.prompt_tokens}, expected 1 or more")
        prompts = prompts_of_context(prompts, options.prompt_tokens, limit=len(prompts))
    variants, facts = _variants(options, longest=max(len(prompt.tokens) for prompt in prompts))
    by_batch: dict[str, dict[str, dict[str, object]]] = {}
    say(f"{'requests':>9}" + "".join(f"{name:>20}" for name in variants) + "   tokens/s")
    for batch in options.batches:
        _run(variants, prompts, batch=batch, first=0)  # compiles, and captures graphs
        runs = [
            _run(variants, prompts, batch=batch, first=repeat * batch)
            for repeat in range(options.repeats)
        ]
        by_batch[str(batch)] = {
            name: _row(
                [run[name] for run in runs],
                [run["plain"] for run in runs],
                [run[_SERVED[name]] for run in runs] if name in _SERVED else None,
                options,
            )
            for name in variants
        }
        rates = (by_batch[str(batch)][name]["tokens_per_s"] for name in variants)
        say(f"{batch:>9}" + "".join(f"{rate:>20.1f}" for rate in rates))
    print_report({"batches": by_batch, **facts})


def _run(
    variants: Mapping[str, Generate], prompts: Sequence[Prompt], *, batch: int, first: int
) -> dict[str, "_Run"]:
    """Returns the run of each variant on `batch` prompts from `first` on."""
    own_prompts = list(islice(cycle(prompts), first, first + batch))
    runs: dict[str, _Run] = {}
    for name, generate in variants.items():
        started = time.perf_counter()
        texts = generate(own_prompts)
        runs[name] = _Run(seconds=time.perf_counter() - started, texts=texts)
    return runs


def _row(
    runs: "Sequence[_Run]",
    plain: "Sequence[_Run]",
    engine: "Sequence[_Run] | None",
    options: BatchedOptions,
) -> dict[str, object]:
    """`engine`: runs of the engine in this process, of a service's variant."""
    num_tokens = len(runs[0].texts) * options.max_tokens
    return {
        "tokens_per_s": round(num_tokens / statistics.median(run.seconds for run in runs), 1),
        "over_plain": _over(runs, plain),
        **({} if engine is None else {"over_engine": _over(runs, engine)}),
        "texts_unlike_plain": sum(
            text != plain_text
            for own, other in zip(runs, plain, strict=True)
            for text, plain_text in zip(own.texts, other.texts, strict=True)
        ),
    }


def _over(runs: "Sequence[_Run]", others: "Sequence[_Run]") -> object:
    return over_other(
        [
            PromptTimes(ours_s=own.seconds, other_s=other.seconds)
            for own, other in zip(runs, others, strict=True)
        ]
    ).as_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Time and texts of one batch."""

    seconds: float
    texts: list[list[int]]


def _variants(
    options: BatchedOptions, *, longest: int
) -> tuple[Mapping[str, Generate], Mapping[str, object]]:
    """Returns the variants, and what a reader must know of them. Raises ConfigError for prompts
    that do not fit the model, and RequestError for sampling parameters out of range."""
    max_running = max(options.batches)
    pages_per_request = -(-(longest + options.max_tokens + 16) // _PAGE_SIZE)
    config = EngineConfig(
        model=ModelConfig(path=options.model, dtype=options.dtype, device=options.device),
        cache=CacheConfig(
            page_size=_PAGE_SIZE,
            num_pages=max_running * pages_per_request,
            prefix_caching=False,
            kv_cache_dtype=options.kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(max_running=max_running),
    )
    layout = layout_of(config)
    room = layout.max_model_len - options.max_tokens
    if longest > room:
        raise ConfigError(
            f"found a prompt of {longest} tokens, expected at most {room} with --max-tokens "
            f"{options.max_tokens}: use shorter prompts"
        )
    TextParams.model_validate(options.sampling)
    sampling = SamplingParams(max_tokens=options.max_tokens, **options.sampling)  # type: ignore[arg-type]
    ours = partial(_ours, LocalEngine(config), sampling)
    variants: dict[str, Generate] = {
        "plain": partial(ours, SpeculationParams(mode="off")),
        "speculation": partial(ours, SpeculationParams()),
        "ngram": partial(ours, SpeculationParams(controller="ngram")),
    }
    if options.url is not None:
        body = {
            "model": model_served_at(options.url),
            "max_tokens": options.max_tokens,
            "seed": sampling.seed,
            **options.sampling,
        }
        for name, mode in zip(_SERVED, ("off", "auto"), strict=True):
            variants[name] = partial(_service, options.url, body | {"speculation": {"mode": mode}})
    machine = engine_on(layout.device).machine(
        layout.device, dtype=layout.dtype, numerics=config.model.numerics, num_threads=1
    )
    facts: dict[str, object] = {
        "machine": machine,
        "dtype": layout.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
        "sampling": options.sampling,
    }
    if not options.skip_transformers:
        theirs = fastest_transformers_model(options.model, device=layout.device, ours=layout.dtype)
        facts["transformers"] = theirs.as_json()
        variants["transformers"] = partial(
            _transformers, theirs.model, layout.device, options.max_tokens, options.sampling
        )
    return variants, facts


def _ours(
    engine: LocalEngine,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    prompts: Sequence[Prompt],
) -> list[list[int]]:
    requests = [
        Request(
            request_id=RequestId(f"{number}"),
            prompt=tuple(prompt.tokens),
            sampling=sampling,
            speculation=speculation,
        )
        for number, prompt in enumerate(prompts)
    ]
    return [list(generation.tokens) for generation in engine.generate(requests)]


def _service(url: str, body: Mapping[str, object], prompts: Sequence[Prompt]) -> list[list[int]]:
    """Generates with a service, which does not know these prompts from another run."""
    options = {
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": uuid4().hex,
    }
    bodies = [{**body, **options, "prompt": list(prompt.tokens)} for prompt in prompts]
    streams = asyncio.run(ask_all(url, bodies, concurrency=len(bodies)))
    for stream in streams:
        if not stream.is_complete:
            raise EngineError(stream.error or "the stream ended before its text")
    return [list(stream.tokens) for stream in streams]


def _transformers(
    model: Any,
    device: torch.device,
    max_tokens: int,
    sampling: Mapping[str, float],
    prompts: Sequence[Prompt],
) -> list[list[int]]:
    width = max(len(prompt.tokens) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left, as generation needs
        ids[row, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        mask[row, width - len(prompt.tokens) :] = 1
    greedy = {"do_sample": False, "repetition_penalty": sampling["repetition_penalty"]}
    with torch.inference_mode():
        out = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
            **({"do_sample": True, **sampling} if sampling["temperature"] else greedy),
        )
    return [row[width:].tolist() for row in out]
