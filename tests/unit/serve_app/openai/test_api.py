"""The API as its users meet it: the official client, and raw HTTP where the client is too kind."""

import asyncio
import gzip
import json
import time
from functools import reduce
from operator import add
from typing import Any

import httpx
import openai
import pytest

from eesd_dist.errors import EngineError, PoisonRequest, QueueFull
from eesd_dist.parameters import choice_seed
from eesd_dist.types import FinishReason
from serve_app.openai import sse
from tests.support.event_stream import parsed
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.unit.serve_app.openai.conftest import LIMITS, MAX_MODEL_LEN, MODEL, Api

USER = [{"role": "user", "content": "hi"}]


def _wait_for(condition: object, *, timeout_s: float = 5.0) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def test_a_completion_has_text_usage_and_metrics(api: Api) -> None:
    api.says("the quick brown fox")
    answer = api.client.completions.create(model=MODEL, prompt="once", max_tokens=50, seed=7)
    num_tokens = len(api.tokenizer.encode("the quick brown fox")) + 1
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "the quick brown fox"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.prompt_tokens == len(api.tokenizer.encode("once"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    metrics = answer.model_extra["metrics"]
    assert metrics["seed"] == 7
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["queue_time_ms"] is not None
    speculation = metrics["speculative_decoding"]
    assert speculation["num_spec_steps"] == -(-num_tokens // 3)
    assert speculation["num_spec_tokens"] == 8
    assert "per_step_drafted" not in speculation
    assert api.observed[0].finish_reason is FinishReason.STOP


def test_a_chat_goes_through_the_template(api: Api) -> None:
    api.says("hello")
    answer = api.client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello"
    prompt = api.tokenizer.decode(api.engine.requests[0].prompt, skip_special_tokens=False)
    assert prompt == "<|bos|><|user|>hi<|end|><|assistant|>"
    assert api.engine.requests[0].sampling.max_tokens == MAX_MODEL_LEN - len(
        api.engine.requests[0].prompt
    )


def test_a_streamed_text_is_the_whole_text(api: Api) -> None:
    options = {"model": MODEL, "prompt": "once", "max_tokens": 40, "seed": 3}
    whole = api.client.completions.create(**options)
    chunks = list(api.client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 5


def test_a_chat_stream_opens_with_the_role_and_closes_with_usage(api: Api) -> None:
    api.says("one two three")
    stream = api.client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "one two three"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(api.tokenizer.encode("one two three")) + 1
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_the_wire_has_one_done_and_null_usage_on_the_way(api: Api) -> None:
    api.says("one two")
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    answer = api.post("/v1/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    assert answer.text.count("[DONE]") == 1
    objects = [event.chunk for event in parsed(answer.text)[:-1]]
    assert all(chunk["usage"] is None for chunk in objects[:-1])
    assert objects[-1]["choices"] == []


def test_a_stream_that_waits_for_tokens_says_that_it_is_alive(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    api.engine.delay_s = 0.3
    body = {"model": MODEL, "prompt": "x", "max_tokens": 6, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{api.url}/v1/completions", json=body, timeout=20) as answer:
        lines = [line for line in answer.iter_lines() if line]
    comments = [line for line in lines if line.startswith(":")]
    assert set(comments) == {": keep-alive"}
    assert len(comments) >= 2
    events = [line for line in lines if line not in comments]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"


def test_the_async_client_streams_too(api: Api) -> None:
    api.says("one two three")

    async def text() -> str:
        async with api.async_client as client:
            stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(text()) == "one two three"


def test_three_choices_run_together_with_seeds_of_their_own(api: Api) -> None:
    api.engine.delay_s = 0.005
    options = {"model": MODEL, "prompt": "once", "max_tokens": 20, "seed": 11}
    answer = api.client.completions.create(**options, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert api.engine.max_live == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60
    assert answer.usage.prompt_tokens == len(api.tokenizer.encode("once"))
    single = api.client.completions.create(**options)
    assert single.choices[0].text == answer.choices[0].text
    chunks = api.client.completions.create(**options, n=3, stream=True)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_a_seed_that_was_drawn_is_told_and_gives_the_text_again(api: Api) -> None:
    first = api.client.completions.create(model=MODEL, prompt="once", max_tokens=20)
    seed = first.model_extra["metrics"]["seed"]
    repeat = api.client.completions.create(model=MODEL, prompt="once", max_tokens=20, seed=seed)
    other = api.client.completions.create(model=MODEL, prompt="once", max_tokens=20)
    assert repeat.choices[0].text == first.choices[0].text != other.choices[0].text


def test_all_64_bits_of_a_seed_count_with_or_without_a_sign(api: Api) -> None:
    def text(seed: int) -> str:
        options = {"model": MODEL, "prompt": "once", "max_tokens": 20, "seed": seed}
        return str(api.client.completions.create(**options).choices[0].text)

    assert text(-1) == text(2**64 - 1)
    assert len({text(seed) for seed in (0, -1, 2**63 - 1, -(2**63))}) == 4
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(openai.APIStatusError, match="seed"):
            text(seed)


def test_every_choice_has_a_seed_of_64_bits() -> None:
    assert choice_seed(-1, 0) == 2**64 - 1
    seeds = [choice_seed(5, i) for i in range(1, 1_000)]
    assert max(seeds) >= 2**63 > min(seeds)
    assert len(set(seeds)) == 999


@pytest.mark.parametrize("form", ["texts", "tokens"])
def test_several_prompts_are_several_choices_in_order(api: Api, form: str) -> None:
    prompts = ["one", "two"]
    prompt = prompts if form == "texts" else [list(api.tokenizer.encode(p)) for p in prompts]
    batch = api.client.completions.create(
        model=MODEL, prompt=prompt, n=2, max_tokens=8, temperature=0
    )
    singles = [
        api.client.completions.create(model=MODEL, prompt=p, max_tokens=8, temperature=0)
        for p in prompts
    ]
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices] == [
        answer.choices[0].text for answer in singles for _ in range(2)
    ]


def test_one_prompt_may_be_token_ids(api: Api) -> None:
    ids = list(api.tokenizer.encode("once"))
    by_ids = api.client.completions.create(model=MODEL, prompt=ids, max_tokens=8, seed=1)
    by_text = api.client.completions.create(model=MODEL, prompt="once", max_tokens=8, seed=1)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_completion_logprobs_lie_where_their_text_lies(api: Api) -> None:
    api.says("fox 🙂 jumps")
    answer = api.client.completions.create(model=MODEL, prompt="once", max_tokens=50, logprobs=2)
    text = answer.choices[0].text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == answer.usage.completion_tokens  # type: ignore[union-attr]
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token) or token == "<|end|>"
    assert sum(token.startswith("bytes:") for token in logprobs.tokens) >= 2
    assert all(
        token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_carry_the_bytes_of_every_token(api: Api, stream: bool) -> None:
    api.says("fox 🙂")
    options = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = list(api.client.chat.completions.create(**options, stream=True))
        content = [
            entry
            for chunk in chunks
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
    else:
        answer = api.client.chat.completions.create(**options)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "fox 🙂"
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_an_emoji_never_comes_in_pieces(api: Api) -> None:
    api.says("a🙂b🙃c")
    api.engine.group = 1
    chunks = list(
        api.client.completions.create(model=MODEL, prompt="x", max_tokens=50, stream=True)
    )
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == "a🙂b🙃c"
    assert texts.count("🙂") == 1
    assert not any("\ufffd" in text for text in texts)


def test_an_emoji_cut_off_by_the_limit_is_not_shown_broken(api: Api) -> None:
    api.says("a🙂")
    answer = api.client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    assert answer.choices[0].text == "a"
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("rounds_per_batch", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_and_the_work(
    api: Api, stream: bool, rounds_per_batch: int
) -> None:
    api.engine.rounds_per_batch = rounds_per_batch
    api.says("the cat sat on the mat and much more that nobody needs")
    api.engine.group = 1
    api.engine.delay_s = 0.001
    if stream:
        chunks = list(
            api.client.completions.create(
                model=MODEL,
                prompt="x",
                max_tokens=90,
                stop=["sat on"],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        usage = chunks[-1].usage
        reason = chunks[-2].choices[0].finish_reason
    else:
        answer = api.client.completions.create(
            model=MODEL, prompt="x", max_tokens=90, stop=["sat on"]
        )
        text, usage = answer.choices[0].text, answer.usage
        reason = answer.choices[0].finish_reason
    assert (text, reason) == ("the cat ", "stop")
    assert usage is not None
    assert usage.completion_tokens == len(api.tokenizer.encode("the cat sat on"))
    _wait_for(lambda: api.engine.num_live == 0)
    assert api.engine.aborted == [api.engine.requests[0].request_id]


def test_the_stop_string_can_be_kept(api: Api) -> None:
    api.says("the cat sat on the mat")
    answer = api.post(
        "/v1/completions",
        {"prompt": "x", "max_tokens": 90, "stop": "sat", "include_stop_str_in_output": True},
    ).json()
    assert answer["choices"][0]["text"] == "the cat sat"
    assert answer["choices"][0]["stop_reason"] == "sat"


def test_a_finished_text_is_not_aborted(api: Api) -> None:
    api.says("the cat")
    api.client.completions.create(model=MODEL, prompt="x", max_tokens=90)
    assert api.engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(api: Api, stream: bool) -> None:
    api.engine.delay_s = 0.2
    body = {"model": MODEL, "prompt": "x", "max_tokens": 150, "stream": stream, "n": 2}
    body |= {"ignore_eos": True}
    patience_s = 20.0 if stream else 1.5
    with (
        httpx.Client(base_url=api.url, timeout=httpx.Timeout(20, read=patience_s)) as client,
        pytest.raises(httpx.ReadTimeout) if not stream else _nothing(),
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        next(answer.iter_lines())
    _wait_for(lambda: api.engine.num_live == 0)
    assert set(api.engine.aborted) == {request.request_id for request in api.engine.requests}
    assert len(api.engine.aborted) == 2
    _wait_for(lambda: len(api.observed) == 2)
    assert {timings.finish_reason for timings in api.observed} == {FinishReason.ABORT}


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_speculation_parameters_reach_the_engine(api: Api) -> None:
    wish = {
        "mode": "auto",
        "controller": "beta",
        "max_draft_tokens": 2,
        "tree": "dynamic",
        "detailed": True,
    }
    answer = api.client.completions.create(
        model=MODEL, prompt="x", max_tokens=9, extra_body={"speculation": wish}
    )
    speculation = api.engine.requests[0].speculation
    assert (speculation.mode, speculation.controller, speculation.max_draft_tokens) == (
        "auto",
        "beta",
        2,
    )
    assert speculation.tree == "dynamic"
    report = answer.model_extra["metrics"]["speculative_decoding"]
    assert report["per_step_drafted"] == [2, 2, 2]
    assert report["num_spec_tokens"] == 2
    off = api.client.completions.create(
        model=MODEL, prompt="x", max_tokens=9, extra_body={"speculation": {"mode": "off"}}
    )
    assert off.model_extra["metrics"]["speculative_decoding"] is None


def test_all_sampling_fields_reach_the_engine(api: Api) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.25,
        "logit_bias": {"7": -100, "3": 1.5},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "seed": None,
        "user": "somebody",
        "unknown_thing": 1,
        "features": {"exits": [1], "top_k": 4},
    }
    assert api.post("/v1/completions", body).status_code == 200
    assert api.engine.requests[0].features is None, "only an operator can ask for features"
    sampling = api.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 0.25)
    assert sampling.logit_bias == ((3, 1.5), (7, -100.0))
    assert (sampling.stop_token_ids, sampling.min_tokens) == ((9,), 2)


def test_the_trace_context_goes_along(api: Api) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    api.client.completions.create(
        model=MODEL, prompt="x", extra_headers={"traceparent": traceparent}
    )
    assert api.engine.requests[0].traceparent == traceparent


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": "\ud83d"}, "prompt"),
        ({"prompt": "x" * 500}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"speculation": {"controler": "beta"}}, "speculation.controler"),
        ({"speculation": {"controller": "magic"}}, "speculation.controller"),
        ({"speculation": {"tree": "oak"}}, "speculation.tree"),
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
    ],
)
def test_a_wrong_completion_field_is_named(api: Api, extra: dict[str, object], param: str) -> None:
    body = json.dumps({"prompt": "x"} | extra)
    answer = api.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert param.split(".")[-1] in error["message"] or "prompt" in error["message"]
    assert api.engine.requests == []


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_a_wrong_chat_field_is_named(api: Api, extra: dict[str, object], param: str) -> None:
    answer = api.post("/v1/chat/completions", {"messages": USER} | extra)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_harmless_values_of_refused_fields_pass(api: Api) -> None:
    body = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "metadata": {"a": "b"},
        "priority": 3,
    }
    assert api.post("/v1/chat/completions", body).status_code == 200


def test_an_unknown_model_is_404_and_a_long_prompt_says_how_much_to_cut(api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        api.client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="cut ") as long:
        api.client.completions.create(model=MODEL, prompt=[1] * MAX_MODEL_LEN)
    assert long.value.code == "context_length_exceeded"


def test_no_json_and_no_such_path_are_said_in_the_same_shape(api: Api) -> None:
    for answer, status in (
        (api.http.post("/v1/completions", content="{"), 400),
        (api.post("/v1/completions", [1]), 400),
        (api.get("/v1/nothing"), 404),
        (api.get("/v1/completions"), 405),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_a_time_to_wait(api: Api, stream: bool) -> None:
    api.engine.refusal = QueueFull(num_waiting=9, limit=9)
    answer = api.post("/v1/completions", {"prompt": "x", "stream": stream})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_broken_engine_is_503_and_a_bug_is_500_without_its_details(api: Api) -> None:
    api.engine.refusal = EngineError("rank 1 is gone")
    answer = api.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 503
    assert "rank 1 is gone" in answer.json()["error"]["message"]
    api.engine.refusal = KeyError("secret")
    answer = api.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_a_request_that_is_refused_for_good_is_not_invited_to_try_again(api: Api) -> None:
    api.engine.refusal = PoisonRequest(request_id="r", crashes=2, reason="a bug")
    answer = api.post("/v1/completions", {"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "poison_request")


def test_numbers_beyond_their_fields_mean_all_or_are_refused(api: Api) -> None:
    assert api.post("/v1/completions", {"prompt": "x", "top_k": 3_000_000_000}).status_code == 200
    assert api.engine.requests[-1].sampling.top_k == 2**31 - 1
    answer = api.post("/v1/completions", {"prompt": "x", "logit_bias": {"1" * 5000: 1.0}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


def test_the_choices_of_one_request_take_turns(api: Api) -> None:
    body = {"prompt": ["a", "b", "c"], "n": 42, "max_tokens": 2, "seed": 1}
    choices = api.post("/v1/completions", body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(126))
    assert 1 < api.engine.max_live <= 16, "half of max_running is left to other requests"


def test_rounds_that_arrive_together_are_one_chunk(api: Api) -> None:
    api.says("the cat sat on the mat")
    api.engine.group = 2
    body = {"prompt": "x", "max_tokens": 90, "stream": True, "logprobs": 1, "seed": 1}
    body |= {"return_token_ids": True}

    def chunks() -> list[dict[str, Any]]:
        events = api.post("/v1/completions", body).text.split("\n\n")
        return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]

    rounds = chunks()
    api.engine.rounds_per_batch = 3
    batches = chunks()
    assert len(batches) == -(-len(rounds) // 3)
    for name in ("text", "token_ids"):
        values = [choice[name] for choice in rounds]
        assert [choice[name] for choice in batches] == [
            reduce(add, values[at : at + 3]) for at in range(0, len(values), 3)
        ]
    logprobs = [value for choice in rounds for value in choice["logprobs"]["token_logprobs"]]
    assert logprobs == [
        value for choice in batches for value in choice["logprobs"]["token_logprobs"]
    ]


@pytest.mark.parametrize("rounds_per_batch", [1, 50])
def test_an_error_in_the_middle_of_a_stream_is_its_last_object(
    api: Api, rounds_per_batch: int
) -> None:
    api.engine.rounds_per_batch = rounds_per_batch
    api.engine.breaks_after = 6
    api.engine.breakage = EngineError("rank 1 is gone")
    body = {"prompt": "x", "max_tokens": 30, "stream": True, "n": 2}
    events = api.post("/v1/completions", body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) > 3, "tokens before the error"
    error = json.loads(events[-3].removeprefix("data: "))["error"]
    assert error["message"] == "rank 1 is gone"
    assert error["code"] == "engine_error"
    with pytest.raises(openai.APIError, match="rank 1 is gone"):
        list(api.client.completions.create(model=MODEL, prompt="x", max_tokens=30, stream=True))


def test_echo_and_token_ids_come_back_when_asked_for(api: Api) -> None:
    api.says("fox")
    body = {"prompt": "quick ", "echo": True, "return_token_ids": True}
    choice = api.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "quick fox"
    assert choice["prompt_token_ids"] == list(api.tokenizer.encode("quick "))
    assert choice["token_ids"] == [*api.tokenizer.encode("fox"), 0]


def test_models_tokens_and_version_can_be_asked_for(api: Api) -> None:
    assert [model.id for model in api.client.models.list()] == [MODEL]
    assert api.client.models.retrieve(MODEL).id == MODEL
    assert api.get("/v1/models/other").status_code == 404
    assert api.get("/v1/models").json()["data"][0]["max_model_len"] == MAX_MODEL_LEN
    ids = list(api.tokenizer.encode("the fox"))
    assert api.post("/tokenize", {"prompt": "the fox"}).json()["tokens"] == ids
    assert api.post("/detokenize", {"tokens": ids}).json() == {"prompt": "the fox"}
    assert api.post("/tokenize", {"messages": USER}).json()["count"] > 4
    assert api.post("/tokenize", {}).status_code == 400
    assert api.post("/detokenize", {"tokens": [99999]}).status_code == 400
    assert set(api.get("/version").json()) == {"version"}


def test_health_follows_the_engine_and_liveness_does_not(api: Api) -> None:
    answer = api.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    api.illness = "no round has gone through for 40 s"
    answer = api.get("/health")
    assert answer.status_code == 503
    assert "40 s" in answer.json()["error"]["message"]
    assert api.get("/ping").status_code == 200
    assert api.get("/metrics").text.startswith("eesd_")


def test_a_key_is_asked_for_where_one_is_set() -> None:
    app = toy_api(ToyEngine(), model_name=MODEL, max_model_len=100, limits=LIMITS, api_key="s3cret")
    with (
        serving(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret", max_retries=0) as good,
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as bad,
    ):
        assert good.completions.create(model=MODEL, prompt="x").choices[0].finish_reason
        with pytest.raises(openai.AuthenticationError):
            bad.completions.create(model=MODEL, prompt="x")
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401


def test_the_bytes_of_a_chats_logprobs_are_those_of_its_text(api: Api) -> None:
    """The end token is in the list, and not in the text."""
    api.says("ünïcode ends")
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    for skips in (True, False):
        answer = api.post("/v1/chat/completions", body | {"skip_special_tokens": skips}).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        entries = choice["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert text == choice["message"]["content"] == "ünïcode ends"
        assert entries[-1]["bytes"] == []
        assert entries[-1]["token"]


@pytest.mark.parametrize("fields", [{"n": 2.0}, {"max_tokens": 3.0}, {"top_k": 4.0, "seed": 7.0}])
def test_a_whole_number_may_be_written_with_a_point(api: Api, fields: dict[str, float]) -> None:
    body = {"prompt": "x", "max_tokens": 4, "seed": 1}
    whole = {name: int(value) for name, value in fields.items()}
    assert b".0" in json.dumps(fields).encode()
    answers = [api.post("/v1/completions", body | options).json() for options in (fields, whole)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert api.post("/v1/completions", body | {"n": 1.5}).status_code == 400


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br", 415), ("identity", 200)])
def test_a_compressed_body_is_refused_by_name(api: Api, encoding: str, status: int) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    content = gzip.compress(body) if encoding == "gzip" else body
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = api.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 415:
        assert answer.json()["error"]["code"] == "unsupported_encoding"
        assert encoding in answer.json()["error"]["message"]
