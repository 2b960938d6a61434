"""Log-probabilities of prompts, as evaluation harnesses ask for them."""

import json
from typing import Any

import pytest

from tests.support.event_stream import WITH_IDS, parsed
from tests.unit.serve_app.openai.conftest import LIMITS, MODEL, Api

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def echoed(api: Api, **fields: Any) -> Any:
    body = {"prompt": "the cat", "max_tokens": 3, "echo": True, "logprobs": 2, "seed": 1}
    answer = api.post("/v1/completions", body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_echo_has_the_log_probabilities_of_the_prompt(api: Api) -> None:
    (choice,) = echoed(api)["choices"]
    prompt = api.tokenizer.encode("the cat")
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(prompt) + 3
    assert logprobs["token_logprobs"][: len(prompt)] == [None, *(-float(t) for t in prompt[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) in (2, 3)  # with the token itself
    text, offsets = choice["text"], logprobs["text_offset"]
    assert text.startswith("the cat")
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[len(prompt)] == len("the cat")
    assert api.engine.requests[0].sampling.prompt_logprobs == 2
    assert api.engine.requests[0].sampling.top_logprobs == 2


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_reads_the_log_probability_of_its_continuation(max_tokens: int, api: Api) -> None:
    """As lm-evaluation-harness asks: several prompts as tokens, one token or none generated."""
    prompts = [[5, 9, 70, 71], [7, 8]]
    answer = echoed(api, prompt=prompts, max_tokens=max_tokens, logprobs=1, temperature=0)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + max_tokens
        assert logprobs["token_logprobs"][: len(prompt)] == [None, *(-float(t) for t in prompt[1:])]
        assert choice["finish_reason"] == "length"
        if max_tokens == 0:
            assert choice["text"] == api.tokenizer.decode(prompt)
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens


def test_no_tokens_without_an_echo_are_an_empty_text(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 0}
    answer = api.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert api.post("/v1/chat/completions", CHAT | {"max_tokens": 0}).status_code == 400


def test_a_streamed_echo_has_them_with_its_first_token(api: Api) -> None:
    whole = echoed(api, n=2)
    body = {"prompt": "the cat", "max_tokens": 3, "echo": True, "logprobs": 2, "seed": 1, "n": 2}
    answer = api.post("/v1/completions", body | {"stream": True})
    chunks = [json.loads(e.data) for e in parsed(answer.text) if e.data != "[DONE]"]
    for index, choice in enumerate(whole["choices"]):
        own_chunks = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            entries = [
                e for chunk in own_chunks if chunk["logprobs"] for e in chunk["logprobs"][name]
            ]
            assert entries == choice["logprobs"][name]
        assert "".join(chunk["text"] for chunk in own_chunks) == choice["text"]


def test_a_resumed_stream_does_not_repeat_them(api: Api) -> None:
    body = {"prompt": "the cat", "max_tokens": 6, "echo": True, "logprobs": 2, "seed": 1}
    body |= {"stream": True}
    whole = parsed(api.http.post("/v1/completions", json=body, headers=WITH_IDS).text)
    with_ids = [at for at, event in enumerate(whole) if event.id]
    assert len(with_ids) > 1
    for at in with_ids:
        answer = api.http.post(
            "/v1/completions", json=body, headers={"Last-Event-ID": whole[at].id}
        )
        suffix = [event.data for event in parsed(answer.text)]
        assert suffix == [event.data for event in whole[at + 1 :]]


def test_prompt_logprobs_are_in_the_format_of_vllm(api: Api) -> None:
    prompt = [5, 9, 70]
    body = {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 2}
    (choice,) = api.post("/v1/completions", body).json()["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert list(second) == ["0", "1", "9"]
    assert second["0"]["logprob"] == -0.25
    assert [entry["rank"] for entry in second.values()] == [1, 2, None]
    assert third["70"] == {
        "logprob": -70.0,
        "rank": None,
        "decoded_token": api.tokenizer.decode([70]),
    }
    assert choice["logprobs"] is None
    chat = api.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 0}).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]


def test_a_long_prompt_is_written_in_parts(api: Api) -> None:
    prompt = list(range(5, 105))
    answer = echoed(api, prompt=prompt, prompt_logprobs=3)
    (choice,) = answer["choices"]
    assert len(choice["prompt_logprobs"]) == 100
    assert len(choice["logprobs"]["tokens"]) == 103


def test_what_cannot_be_is_refused(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    streamed = api.post("/v1/completions", body | {"prompt_logprobs": 1, "stream": True})
    assert streamed.json()["error"]["param"] == "prompt_logprobs"
    assert api.post("/v1/completions", body | {"prompt_logprobs": 21}).status_code == 400
    before, LIMITS.max_answer_extras = LIMITS.max_answer_extras, 100
    try:
        many = {"prompt": list(range(5, 60)), "max_tokens": 2, "model": MODEL}
        assert api.post("/v1/completions", many | {"prompt_logprobs": 0}).status_code == 200
        assert api.post("/v1/completions", many | {"prompt_logprobs": 1}).status_code == 400
    finally:
        LIMITS.max_answer_extras = before
