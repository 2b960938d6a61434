"""Log-probabilities of prompts are those that the same tokens had when they were generated."""

import dataclasses

import pytest
from msgspec import structs

from eesd_dist.config import DType, SchedulerConfig, SpeculationConfig
from eesd_dist.engine import verify
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import RequestError
from eesd_dist.types import (
    Emission,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TokenLogprobs,
)
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import prompts


def asking(
    prompt: tuple[TokenId, ...],
    name: str,
    *,
    num_top: int = 3,
    mode: str = "auto",
    max_tokens: int = 9,
) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=prompt,
        sampling=SamplingParams(
            temperature=0.7,
            seed=5,
            max_tokens=max_tokens,
            prompt_logprobs=num_top,
            top_logprobs=1,
        ),
        speculation=SpeculationParams(mode=mode),  # type: ignore[arg-type]
    )


def emitted(engine: LocalEngine, requests: list[Request]) -> dict[RequestId, list[Emission]]:
    emissions_of: dict[RequestId, list[Emission]] = {request.request_id: [] for request in requests}
    for emission in engine.stream(requests):
        emissions_of[emission.request_id].append(emission)
    return emissions_of


def of_prompts(engine: LocalEngine, requests: list[Request]) -> list[tuple[TokenLogprobs, ...]]:
    """Returns those on the first emissions; asserts that no others have any."""
    emissions_of = emitted(engine, requests)
    for emissions in emissions_of.values():
        assert all(not emission.prompt_logprobs for emission in emissions[1:])
    return [emissions_of[request.request_id][0].prompt_logprobs for request in requests]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_that_becomes_a_prompt_keeps_its_log_probabilities(
    dtype: DType, make_config: MakeConfig
) -> None:
    engine = LocalEngine(make_config(dtype=dtype))
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=40, top_logprobs=3)
    texts = [
        Request(request_id=RequestId(f"text {i}"), prompt=prompt, sampling=sampling)
        for i, prompt in enumerate(prompts(4))
    ]
    generated = engine.generate(texts)
    prompt_requests = [
        asking((*text.prompt, *generation.tokens), f"prompt {i}", mode=("auto", "off")[i % 2])
        for i, (text, generation) in enumerate(zip(texts, generated, strict=True))
    ]
    prompt_logprobs = of_prompts(engine, prompt_requests)
    for request, text, generation, logprobs in zip(
        prompt_requests, texts, generated, prompt_logprobs, strict=True
    ):
        assert len(logprobs) == len(request.prompt) - 1
        assert list(logprobs[len(text.prompt) - 1 :]) == generation.logprobs
    engine.engine.check()


def test_chunks_batches_blocks_and_preemptions_change_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_requests = [
        asking(prompt, f"{i}", num_top=(0, 3, 20)[i % 3], max_tokens=40)
        for i, prompt in enumerate(prompts(6))
    ]
    plain = [
        dataclasses.replace(
            request,
            request_id=RequestId(f"plain {request.request_id}"),
            sampling=structs.replace(request.sampling, prompt_logprobs=None),
        )
        for request in prompt_requests
    ]
    engine = LocalEngine(make_config(scheduler=SchedulerConfig(prefill_chunk=512)))
    expected = [of_prompts(engine, [request])[0] for request in prompt_requests]
    for request, logprobs in zip(prompt_requests, expected, strict=True):
        assert len(logprobs) == len(request.prompt) - 1
        assert {len(token_logprobs.top) for token_logprobs in logprobs} <= {
            request.sampling.prompt_logprobs
        }
    texts = [generation.tokens for generation in engine.generate(plain)]
    for config in (
        make_config(scheduler=SchedulerConfig(prefill_chunk=7)),
        make_config(num_pages=10),
    ):
        batch_engine = LocalEngine(config)
        emissions_of = emitted(batch_engine, [*prompt_requests, *plain])
        assert [emissions_of[r.request_id][0].prompt_logprobs for r in prompt_requests] == expected
        for requests in (prompt_requests, plain):
            tokens = [[t for e in emissions_of[r.request_id] for t in e.tokens] for r in requests]
            assert tokens == texts
        assert not any(e.prompt_logprobs for r in plain for e in emissions_of[r.request_id])
        repeated = of_prompts(
            batch_engine, [dataclasses.replace(prompt_requests[5], request_id=RequestId("x"))]
        )
        assert repeated == expected[5:], "no cached page is used"
    assert batch_engine.engine.load().num_preemptions > 0
    monkeypatch.setattr(verify, "logits_block", lambda _: 5)
    assert of_prompts(LocalEngine(make_config()), prompt_requests) == expected


def test_a_request_that_goes_on_has_them_no_more(make_config: MakeConfig) -> None:
    engine = LocalEngine(make_config())
    request = asking(prompts(1)[0], "first")
    tokens = [t for e in emitted(engine, [request])[request.request_id] for t in e.tokens]
    resumed = dataclasses.replace(request, generated=tuple(tokens[:4]))
    (emissions,) = emitted(engine, [resumed]).values()
    assert [t for e in emissions for t in e.tokens] == tokens[4:]
    assert not any(emission.prompt_logprobs for emission in emissions)


def test_a_prompt_of_one_token_has_none(make_config: MakeConfig) -> None:
    engine = LocalEngine(make_config())
    assert of_prompts(engine, [asking((TokenId(7),), "short")]) == [()]


def test_rejection_sampling_reports_none_and_says_so(make_config: MakeConfig) -> None:
    speculation = SpeculationConfig(max_draft_tokens=3, acceptance="rejection", learn_costs=False)
    engine = LocalEngine(make_config(speculation=speculation))
    with pytest.raises(RequestError, match="rejection sampling"):
        engine.generate([asking(prompts(1)[0], "x")])
