"""Random bodies of requests that have to be served: every endpoint that generates, with its fields
in values that are right and fit each other."""

from collections.abc import Mapping
from random import Random
from typing import Any

Json = dict[str, Any]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_PLAIN = {"stream": False, "speculation": {"mode": "off"}}
_ABOUT_DRAFTS = ("token_origins", "token_texts", "per_step_drafted", "per_step_accepted")
_DIGITS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_GRAMMARS: tuple[Json, ...] = (
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": _DIGITS}}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"regex": "[ab]{1,4}c?"}},
    {"structured_outputs": {"json": _DIGITS, "disable_any_whitespace": True}},
    {"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}},
    {"guided_choice": ["a", "b"]},
    {"guided_regex": "(x|y)+"},
    {"guided_json": _DIGITS},
)


def valid_body(rng: Random) -> tuple[str, Json]:
    """Returns the path and the body of a request."""
    path = rng.choice([COMPLETIONS, COMPLETIONS, CHAT, CHAT, RESPONSES])
    draw = {COMPLETIONS: _completion, CHAT: _chat, RESPONSES: _response}[path]
    body = draw(rng) | _of_all(rng)
    if path != RESPONSES and "stream" not in body and rng.random() < 0.2:
        body["prompt_logprobs"] = rng.randint(0, 3)
    return path, body


def has_one_answer(body: Mapping[str, Any]) -> bool:
    """Whether the body determines the text."""
    return body.get("seed") is not None or body.get("temperature") == 0.0


def plain_body(body: Mapping[str, Any]) -> Json:
    """Returns the same request for a whole answer by plain decoding."""
    left_out = ("request_id", "stream_options", "return_token_origins")
    return {name: value for name, value in body.items() if name not in left_out} | _PLAIN


def outcome(answer: Json) -> list[Json]:
    """Returns what may not depend on drafts: every choice, with its log-probabilities."""
    if "choices" not in answer:
        return [{"status": answer["status"], "text": response_text(answer)}]
    return [
        {name: value for name, value in choice.items() if name not in _ABOUT_DRAFTS}
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    ]


def texts_of(answer: Json) -> dict[int, str]:
    """Returns the texts of a whole answer by choice."""
    if "choices" not in answer:
        return {0: response_text(answer)}
    return {
        choice["index"]: choice.get("text") or (choice.get("message") or {}).get("content") or ""
        for choice in answer["choices"]
    }


def response_text(answer: Json) -> str:
    return "".join(content["text"] for item in answer["output"] for content in item["content"])


def random_text(rng: Random) -> str:
    return "".join(rng.choice('the fox 😀é\n"\\[{') for _ in range(rng.randint(1, 80)))


def odd_fields(rng: Random) -> Json:
    """Returns fields that are right by themselves, but may not fit others."""
    fields: Json = {}
    for _ in range(rng.randint(1, 4)):
        fields |= rng.choice([_sampled(rng), rng.choice(_GRAMMARS), _odd(rng), _restricted(rng)])
    return fields


def _odd(rng: Random) -> Json:
    choices: list[Json] = [
        {"tools": [_TOOL], "tool_choice": rng.choice(["auto", "required", "none"])},
        {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"min_tokens": rng.randint(0, 12)},
        {"max_tokens": rng.choice([0, 1, 4])},
        {"prompt_logprobs": rng.randint(0, 20)},
        {"echo": True, "logprobs": rng.choice([0, 20, True])},
        {"stop_token_ids": [rng.randrange(5000)]},
        {"continue_final_message": True, "add_generation_prompt": rng.random() < 0.5},
        {"best_of": rng.randint(1, 3), "n": rng.randint(1, 3)},
        {"guided_whitespace_pattern": "[ ]?"},
        {"ignore_eos": True},
    ]
    return rng.choice(choices)


def _completion(rng: Random) -> Json:
    body = _generation(rng) | {"prompt": _prompt(rng)}
    if rng.random() < 0.2:
        body["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.2:
        body["echo"] = True
    if rng.random() < 0.1:
        body["add_special_tokens"] = False
    if rng.random() < 0.05:
        body |= {"max_tokens": 0, "min_tokens": 0}
    return body


def _prompt(rng: Random) -> object:
    ids = [[rng.randint(3, 250) for _ in range(rng.randint(1, 20))] for _ in range(2)]
    text = random_text(rng)
    return rng.choice([text, text, text, [text, random_text(rng)], ids[0], ids])


def _chat(rng: Random) -> Json:
    body = _generation(rng) | {"messages": _messages(rng)}
    if rng.random() < 0.5:
        body["max_completion_tokens"] = body["max_tokens"]
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.1:
        body |= {"tools": [_TOOL], "tool_choice": "none", "parallel_tool_calls": False}
    return body


def _messages(rng: Random) -> list[Json]:
    roles = rng.choice([["user"], ["system", "user"], ["user", "assistant", "user"]])
    return [{"role": role, "content": _content(rng)} for role in roles]


def _content(rng: Random) -> object:
    text = random_text(rng)
    return rng.choice([text, text, [{"type": "text", "text": text}]])


def _response(rng: Random) -> Json:
    text = random_text(rng)
    messages = [
        {"role": "user", "content": text},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]},
    ]
    body: Json = {
        "input": rng.choice([text, messages]),
        "max_output_tokens": rng.randint(1, 12),
        "temperature": rng.choice([0.0, 1.0]),
    }
    if rng.random() < 0.3:
        body["instructions"] = random_text(rng)
    if rng.random() < 0.3:
        body["metadata"] = {"a": "b"}
    if rng.random() < 0.2:
        body["text"] = {"format": {"type": "json_schema", "name": "d", "schema": _DIGITS}}
    return body


def _generation(rng: Random) -> Json:
    """Fields of completions and chats."""
    max_tokens = rng.randint(1, 12)
    body: Json = {"max_tokens": max_tokens, "n": rng.choice([1, 1, 1, 2, 3])}
    if rng.random() < 0.6:
        body |= _sampled(rng)
    if rng.random() < 0.15:
        body |= rng.choice(_GRAMMARS) | {"max_tokens": rng.randint(4, 24)}
    else:
        if rng.random() < 0.2:
            body |= _restricted(rng)
        if rng.random() < 0.2:
            body["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.1:
            body["ignore_eos"] = True
    for name in ("return_token_ids", "return_token_origins"):
        if rng.random() < 0.1:
            body[name] = True
    if rng.random() < 0.1:
        body |= {"priority": rng.randint(0, 100)}
    if rng.random() < 0.1:
        body |= {"cache_salt": rng.choice(["a", "b", "é🦊"])}
    return body


def _sampled(rng: Random) -> Json:
    fields: Json = {"temperature": rng.choice([0.0, 0.0, 0.3, 1.0, 2.0])}
    choices: tuple[Json, ...] = (
        {"top_p": rng.choice([0.1, 0.9, 1.0])},
        {"top_k": rng.choice([-1, 1, 5, 2**40])},
        {"min_p": rng.choice([0.0, 0.1, 1.0])},
        {"frequency_penalty": rng.uniform(-2, 2), "presence_penalty": rng.uniform(-2, 2)},
        {"repetition_penalty": rng.choice([0.5, 1.2, 10.0])},
        {"logit_bias": {str(rng.randint(3, 250)): rng.uniform(-100, 100)}},
        {},
    )
    return fields | rng.choice(choices)


def _restricted(rng: Random) -> Json:
    choices: tuple[Json, ...] = (
        {"stop": rng.choice(["e", ["a", "th"], []]), "include_stop_str_in_output": True},
        {"stop_token_ids": [rng.randint(3, 250)]},
        {"allowed_token_ids": rng.sample(range(3, 250), 20)},
        {"bad_words": ["the", "a b"]},
        {"skip_special_tokens": False},
    )
    return rng.choice(choices)


def _of_all(rng: Random) -> Json:
    body: Json = {}
    if rng.random() < 0.9:
        body["seed"] = rng.choice([-(2**63), 0, 2**64 - 1, rng.randrange(2**32)])
    if rng.random() < 0.5:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": rng.random() < 0.5}
    if rng.random() < 0.3:
        body["speculation"] = _speculation(rng)
    if rng.random() < 0.1:
        body["request_id"] = f"fuzz-{rng.randrange(10**9)}"
    if rng.random() < 0.1:
        body |= {"user": None, "temprature": 3, "é": ["no such field"]}
    return body


def _speculation(rng: Random) -> Json:
    return rng.choice(
        [
            {"mode": "off"},
            {"controller": rng.choice(["fixed", "goodput", "beta", "smartspec"])},
            {"max_draft_tokens": rng.randint(0, 64), "workload": "fuzz"},
            {"tree": rng.choice(["none", "static", "dynamic"]), "detailed": True},
        ]
    )
