"""Law 1, on the real engine: speculation changes time, never text."""

import dataclasses
import random

import pytest
from msgspec import structs

from eesd_dist.config import DType, SchedulerConfig, SpeculationConfig
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.engine.local import Generation, LocalEngine
from eesd_dist.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from tests.unit.engine.conftest import MakeConfig

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "warm": SamplingParams(temperature=0.7, max_tokens=24),
    "filtered": SamplingParams(temperature=1.0, top_p=0.9, top_k=40, min_p=0.02, max_tokens=24),
    "penalised": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.4,
        min_tokens=6,
        max_tokens=24,
    ),
    "biased": SamplingParams(
        temperature=0.9, logit_bias=((7, 3.0), (11, -100.0)), max_tokens=24, top_logprobs=3
    ),
}
CONTROLLERS = ("fixed", "smartspec", "beta", "calibration", "goodput")


def prompts(count: int, *, seed: int = 0) -> list[tuple[TokenId, ...]]:
    rng = random.Random(seed)
    return [
        tuple(TokenId(rng.randrange(3, 96)) for _ in range(rng.randrange(3, 45)))
        for _ in range(count)
    ]


def requests(
    count: int, sampling: SamplingParams, speculation: SpeculationParams, tag: str
) -> list[Request]:
    return [
        Request(
            request_id=RequestId(f"{tag}-{i}"),
            prompt=prompt,
            sampling=structs.replace(sampling, seed=70 + i, stop_token_ids=(2,)),
            speculation=speculation,
        )
        for i, prompt in enumerate(prompts(count))
    ]


def texts(generations: list[Generation]) -> list[list[TokenId]]:
    return [generation.tokens for generation in generations]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SAMPLING)
def test_no_controller_changes_a_token(name: str, dtype: DType, make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config(dtype=dtype))
    plain = llm.generate(requests(5, SAMPLING[name], SpeculationParams(mode="off"), "plain"))
    for controller in CONTROLLERS:
        speculative = llm.generate(
            requests(5, SAMPLING[name], SpeculationParams(controller=controller), controller)
        )
        assert texts(speculative) == texts(plain), controller
        assert [g.logprobs for g in speculative] == [g.logprobs for g in plain], controller


@pytest.mark.parametrize("name", ["greedy", "warm"])
def test_requests_of_one_batch_may_have_different_controllers(
    name: str, make_config: MakeConfig
) -> None:
    llm = LocalEngine(make_config())
    count = len(CONTROLLER_NAMES)
    plain = llm.generate(requests(count, SAMPLING[name], SpeculationParams(mode="off"), "plain"))
    mixed = [
        dataclasses.replace(request, speculation=SpeculationParams(controller=controller))
        for request, controller in zip(
            requests(count, SAMPLING[name], SpeculationParams(), "mixed"),
            CONTROLLER_NAMES,
            strict=True,
        )
    ]
    done = llm.generate(mixed)
    assert texts(done) == texts(plain)
    assert sum(sum(g.accepted) for g in done) > 0


@pytest.mark.parametrize("head", ["always", "sometimes", "never", "truncated"])
def test_no_drafter_changes_a_token(head: str, make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config(head))
    for name, sampling in SAMPLING.items():
        plain = llm.generate(requests(3, sampling, SpeculationParams(mode="off"), f"p-{name}"))
        fixed = llm.generate(
            requests(3, sampling, SpeculationParams(controller="fixed"), f"f-{name}")
        )
        assert texts(fixed) == texts(plain), name


def test_a_drafter_that_always_agrees_has_every_token_accepted(make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config("always"))
    for name in ("greedy", "warm"):
        done = llm.generate(
            requests(3, SAMPLING[name], SpeculationParams(controller="fixed"), f"a-{name}")
        )
        drafted = sum(sum(g.drafted) for g in done)
        accepted = sum(sum(g.accepted) for g in done)
        assert drafted > 20
        ended_inside = sum(len(g.drafted) > 0 for g in done)
        assert drafted - accepted <= 5 * ended_inside  # drafts cut off by the end of a text
        assert accepted > 0.8 * drafted


def test_a_drafter_that_never_agrees_costs_rounds_and_nothing_else(
    make_config: MakeConfig,
) -> None:
    llm = LocalEngine(make_config("never"))
    done = llm.generate(
        requests(2, SAMPLING["greedy"], SpeculationParams(controller="fixed"), "never")
    )
    assert sum(sum(g.accepted) for g in done) == 0
    assert all(len(g.tokens) == 24 or g.finish_reason is FinishReason.STOP for g in done)


def test_a_batch_gives_what_each_request_gives_alone(make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config())
    speculation = SpeculationParams(controller="beta")
    batch = llm.generate(requests(6, SAMPLING["warm"], speculation, "together"))
    single = [
        llm.generate([request])[0]
        for request in requests(6, SAMPLING["warm"], speculation, "alone")
    ]
    assert texts(batch) == texts(single)


def test_a_resumed_request_goes_on_with_the_very_same_tokens(make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config())
    whole = llm.generate(requests(4, SAMPLING["penalised"], SpeculationParams(), "whole"))
    for cut in (1, 7, 20):
        halves = [
            dataclasses.replace(
                request,
                request_id=RequestId(f"{request.request_id}-{cut}"),
                generated=tuple(generation.tokens[:cut]),
            )
            for request, generation in zip(
                requests(4, SAMPLING["penalised"], SpeculationParams(), "resumed"),
                whole,
                strict=True,
            )
            if len(generation.tokens) > cut
        ]
        expected = [g.tokens[cut:] for g in whole if len(g.tokens) > cut]
        assert texts(llm.generate(halves)) == expected


def test_running_out_of_pages_costs_time_only(make_config: MakeConfig) -> None:
    roomy = LocalEngine(make_config())
    cramped = LocalEngine(make_config(num_pages=11, scheduler=SchedulerConfig(max_running=8)))
    speculation = SpeculationParams(controller="fixed")
    expected = roomy.generate(requests(6, SAMPLING["warm"], speculation, "roomy"))
    generations = cramped.generate(requests(6, SAMPLING["warm"], speculation, "cramped"))
    assert texts(generations) == texts(expected)
    load = cramped.engine.load()
    assert load.free_pages == load.num_pages


def test_a_cached_prefix_changes_nothing(make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config())
    shared = tuple(TokenId(5 + i % 60) for i in range(70))
    sampling = structs.replace(SAMPLING["warm"], seed=3)

    def ask(tag: str) -> tuple[list[TokenId], int]:
        request = Request(request_id=RequestId(tag), prompt=shared, sampling=sampling)
        emissions = list(llm.stream([request]))
        return [t for e in emissions for t in e.tokens], emissions[0].num_cached_prompt_tokens

    first, cached_at_first = ask("first")
    second, cached_at_second = ask("again")
    assert second == first
    assert cached_at_first == 0
    assert cached_at_second == 64


def test_log_probabilities_under_rejection_sampling_are_those_of_the_tokens_that_left(
    make_config: MakeConfig,
) -> None:
    rejection = SpeculationConfig(max_draft_tokens=4, acceptance="rejection")
    llm = LocalEngine(make_config("sometimes", speculation=rejection))
    sampling = SamplingParams(temperature=1.0, max_tokens=24, top_logprobs=96)
    for mode in ("auto", "off"):
        batch = requests(3, sampling, SpeculationParams(mode=mode), mode)
        for generation in llm.generate(batch):
            for token, token_logprobs in zip(generation.tokens, generation.logprobs, strict=True):
                assert token_logprobs.logprob == pytest.approx(
                    dict(token_logprobs.top)[token], abs=1e-5
                )


def test_rejection_sampling_is_exact_at_temperature_zero(make_config: MakeConfig) -> None:
    rejection = SpeculationConfig(max_draft_tokens=4, acceptance="rejection")
    for head in ("sometimes", "truncated"):
        llm = LocalEngine(make_config(head, speculation=rejection))
        plain = llm.generate(
            requests(3, SAMPLING["greedy"], SpeculationParams(mode="off"), "plain")
        )
        fixed = llm.generate(
            requests(3, SAMPLING["greedy"], SpeculationParams(controller="fixed"), "fixed")
        )
        assert texts(fixed) == texts(plain)


def test_an_aborted_request_gives_its_pages_back(make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config())
    batch = requests(3, SAMPLING["greedy"], SpeculationParams(), "abort")
    for request in batch:
        llm.engine.add(request)
    llm.engine.step(wait_s=0.0)
    llm.engine.abort(batch[1].request_id)
    seen: set[RequestId] = set()
    while llm.engine.has_work:
        seen |= {e.request_id for e in llm.engine.step(wait_s=0.0).emissions}
    load = llm.engine.load()
    assert load.free_pages == load.num_pages
    assert {batch[0].request_id, batch[2].request_id} <= seen
