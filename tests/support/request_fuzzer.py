"""Random requests, valid and broken, sent whole, in pieces, slowly or in part."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.support.raw_http import Part, chunk, chunked_head, get, post

_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/tokenize", "/detokenize"),
)
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        2**64,
        10**400,
        0.5,
        -0.0,
        1e308,
        "",
        "a",
        "é😀",
        "\n\x00",
    ),
    *([], [1], ["a"], [[1, 2]], [[]], {}, {"a": {}}, {"type": "text", "text": "x"}, "x" * 3000),
    [{"role": "user", "content": "hi"}],
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
    *(
        [{"type": "function", "function": {"name": "f"}}],
        [{"role": "assistant", "tool_calls": [_CALL]}],
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "[" * 500}}],
            }
        ],
        {"type": "function", "function": {"name": "f"}},
        "required",
    ),
    *(
        {"regex": "(a"},
        {"choice": ["a", "b"]},
        {"json": "{"},
        {"json": {"not": {}}},
        "(a{999}){999}",
    ),
)
_FIELDS = (
    *("model", "prompt", "messages", "tokens", "n", "max_tokens", "min_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logit_bias", "logprobs"),
    *("echo", "stream", "stream_options", "request_id", "speculation", "ignore_eos", "best_of"),
    *("top_logprobs", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("repetition_penalty", "return_token_ids", "tools", "response_format", "user", "\ud800"),
    *("tool_choice", "parallel_tool_calls", "allowed_token_ids", "bad_words", "prompt_logprobs"),
    *("return_token_origins", "input", "instructions", "max_output_tokens", "text", "metadata"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_HEADERS = (
    *(b"X-Name: \xff", b"X-Request-Id: a b", b"X-Request-Id: fine-1", b"traceparent: nonsense"),
    *(
        b"x-eesd-workload: a b",
        b"x-eesd-workload: chat",
        b"Content-Type: text/plain",
        b"Expect: 100-continue",
    ),
    *(
        b"Content-Length: 3",
        b"Transfer-Encoding: chunked",
        b"Authorization: Bearer \x80",
        b"a" * 300 + b": b",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzedRequest:
    """What is sent on one connection."""

    parts: tuple[bytes | Part, ...]
    whole: bytes | None = None
    """The same request sent plainly, of one that has to be served."""
    leaves: bool = False
    """Whether the client leaves when it has sent everything, without reading."""


def fuzzed(rng: Random) -> FuzzedRequest:
    kinds: tuple[Callable[[Random], FuzzedRequest], ...] = (
        *(_valid, _valid, _wrong_fields, _wrong_fields, _broken_json, _wrong_headers),
        *(_pieces, _chunks, _cut, _noise, _left),
    )
    return rng.choice(kinds)(rng)


def valid_request(rng: Random) -> bytes:
    body: dict[str, object] = {
        "max_tokens": rng.randint(1, 20),
        "n": rng.choice([1, 1, 3]),
        "stream": rng.random() < 0.5,
        "seed": rng.randrange(2**32),
    }
    if rng.random() < 0.5:
        return post("/v1/completions", body | {"prompt": _text(rng)})
    return post(
        "/v1/chat/completions", body | {"messages": [{"role": "user", "content": _text(rng)}]}
    )


def _valid(rng: Random) -> FuzzedRequest:
    get_one = get(rng.choice(["/ping", "/v1/models"]))
    whole = get_one if rng.random() < 0.2 else valid_request(rng)
    return FuzzedRequest(parts=(whole,), whole=whole)


def _wrong_fields(rng: Random) -> FuzzedRequest:
    body: dict[str, object] = {
        rng.choice(_FIELDS): rng.choice(_VALUES) for _ in range(rng.randint(0, 3))
    }
    if rng.random() < 0.8:
        messages = [{"role": "user"}]
        body = {"prompt": "x", "messages": messages, "input": "x", "max_tokens": 4} | body
    return FuzzedRequest(parts=(post(rng.choice(_PATHS), body),))


def _broken_json(rng: Random) -> FuzzedRequest:
    whole = bytearray(json.dumps({"prompt": _text(rng), "max_tokens": 3}).encode())
    for _ in range(rng.randint(1, 5)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    depth = rng.choice([10, 65, 900, 100_000])
    encoded = bytes(whole).decode("latin-1").encode(rng.choice(["utf-16", "utf-32"]))
    lists, objects = b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth
    nested = b'{"prompt":' + rng.choice([lists, objects]) + b',"x":' + lists + b"}"
    body = rng.choice([bytes(whole), lists, objects, nested, lists[:depth], b"NaN", b"", encoded])
    return FuzzedRequest(parts=(post(rng.choice(_PATHS), body),))


def _wrong_headers(rng: Random) -> FuzzedRequest:
    headers = rng.sample(_HEADERS, rng.randint(1, 3))
    return FuzzedRequest(
        parts=(post(rng.choice(_PATHS), {"prompt": "x", "max_tokens": 3}, *headers),)
    )


def _pieces(rng: Random) -> FuzzedRequest:
    whole = valid_request(rng)
    return FuzzedRequest(parts=tuple(_split(rng, whole, pause_s=0.02)), whole=whole)


def _chunks(rng: Random) -> FuzzedRequest:
    body = json.dumps({"prompt": _text(rng), "max_tokens": 3, "seed": 1}).encode()
    size = rng.choice([7, 1000])
    parts = [chunk(body[i : i + size]) for i in range(0, len(body), size)]
    sent = (chunked_head("/v1/completions"), *parts, b"0\r\n\r\n")
    if rng.random() < 0.5:
        return FuzzedRequest(parts=sent, whole=post("/v1/completions", body))
    return FuzzedRequest(
        parts=(*sent[: rng.randint(1, len(sent))], rng.choice([b"zz\r\n", b"-1\r\n"]))
    )


def _cut(rng: Random) -> FuzzedRequest:
    """Some clients wait for an answer, most leave."""
    request = valid_request(rng)
    parts = _split(rng, request[: rng.randrange(len(request))], pause_s=0.1)
    return FuzzedRequest(parts=(*parts, _pause(rng, 0.5)), leaves=rng.random() < 0.8)


def _noise(rng: Random) -> FuzzedRequest:
    first = rng.choice([b"", b"GET ", b"POST /v1/completions HTTP/1.1\r\n", b"\x16\x03\x01"])
    return FuzzedRequest(parts=(first + rng.randbytes(rng.randint(1, 400)),))


def _left(rng: Random) -> FuzzedRequest:
    """Before the answer begins, or in the middle of it."""
    return FuzzedRequest(parts=(valid_request(rng), _pause(rng, 0.5)), leaves=True)


def _pause(rng: Random, longest_s: float) -> Part:
    return Part(data=b"", pause_s=rng.uniform(0.0, longest_s))


def _split(rng: Random, data: bytes, *, pause_s: float) -> list[Part]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    ends = [*cuts, len(data)]
    return [
        Part(data=data[a:b], pause_s=rng.uniform(0.0, pause_s))
        for a, b in zip([0, *cuts], ends, strict=True)
    ]


def _text(rng: Random) -> str:
    return "".join(rng.choice('the fox 😀é\n"\\[{') for _ in range(rng.randint(1, 80)))
