"""Random requests, valid and broken, sent whole, in pieces, slowly or in part."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.support.raw_http import Part, chunk, get, post
from tests.support.valid_bodies import (
    RESPONSES,
    has_one_answer,
    odd_fields,
    plain_body,
    random_text,
    valid_body,
)

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
    *(math.nan, math.inf, -math.inf, -(2**63) - 1, 1e-320, "\ud800", "\udfff\ud83d", "NaN"),
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
    *("priority", "skip_special_tokens", "include_stop_str_in_output", "frequency_penalty"),
    *("guided_whitespace_pattern", "max_completion_tokens", "add_special_tokens", "suffix"),
    *("previous_response_id", "store", "background", "truncation", "include", "functions"),
    "cache_salt",
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
    *(b"X-Long: " + b"x" * 70_000, b"X-Many: x\r\n" * 300 + b"X-Last: x", b"Content-Length: -1"),
    *(b"X-Request-Id: " + b"x" * 129, b"X-Request-Id: \xf0\x9f\x98\x80", b"X-Request-Id:"),
    *(b"X-Eesd-Event-Ids: perhaps", b"X-Eesd-Event-Ids: \xff", b"X-Eesd-Event-Ids: false"),
    *(b"Last-Event-ID: AQt1", b"Last-Event-ID: " + b"A" * 200, b"Last-Event-ID: \xff"),
    *(b"Content-Encoding: gzip", b"Content-Type: application/json; charset=utf-16", b"Accept: x"),
    *(b"Content-Length: 999999999999", b"Content-Length: 0x10", b"Connection: upgrade, close"),
    *(b"Host: other", b"Upgrade: websocket\r\nConnection: Upgrade", b"Content-Type: multipart/x"),
    *(
        b" folded: x",
        b"no colon",
        b": empty",
        b"Transfer-Encoding: gzip, chunked",
        b"Range: bytes=0-",
    ),
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
    b"Proxy-Connection: Upgrade\r\nUpgrade: h2c",
    *(b"X-Request-Id: a\r\nX-Request-Id: b", b"Authorization: Bearer other", b"Cookie: \x01"),
)


_TARGETS = (
    *("/", "//v1/models", "/v1/models/other", "/v1/models/%00", "/v1/models/%2e%2e%2fx", "/v1"),
    *("/v1/models/" + "x" * 3000, "/v1/models/é", "/v1/completions?stream=true&n=%ff", "/nothing"),
    *("/debug/traces?limit=0", "/debug/traces?limit=x", "/debug/traces/%F0%9F%98%80", "/debug/"),
    *("/debug/pipelines/other/drain", "/debug/pipelines/%0a/undrain", "/console/../v1/models"),
    *("http://other/v1/models", "*", "/openapi.json/", "/-/healthz", "/-/routes/x"),
)
_METHODS = (
    "GET",
    "HEAD",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "post",
    "X" * 40,
)
_READ = (
    *("/ping", "/health", "/ready", "/version", "/v1/models", "/openapi.json", "/metrics"),
    *("/docs", "/console", "/debug/state", "/debug/pipelines", "/debug/controllers"),
    *("/debug/rounds", "/debug/traces", "/debug/traces?limit=3"),
)
"""Paths that any service of this project answers with 200; the rest of a toy's are 404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzedRequest:
    """What is sent on one connection."""

    segments: tuple[bytes | Part, ...]
    kind: str = ""
    is_valid: bool = False
    """Whether it has to be served."""
    leaves: bool = False
    """Whether the client leaves when it has sent everything, without reading."""
    leaves_after: int | None = None
    """Events with an id after which the client leaves a stream, to resume it at once."""
    plain: bytes | None = None
    """The same request for a whole answer by plain decoding, which has the same texts."""
    others: tuple[bytes, ...] = ()
    """Further requests on the same connection, which have to be served too."""
    pipelined: bool = False
    """Whether these are sent before the first is answered."""


class RequestFuzzer:
    """Draws requests. `num_compared` of a hundred valid ones, where possible, come with their
    plain twin; `is_service`: whether there are the paths of operators and of web pages."""

    def __init__(
        self, *, api_key: str | None = None, num_compared: int = 20, is_service: bool = False
    ) -> None:
        self._key = () if api_key is None else (b"Authorization: Bearer " + api_key.encode(),)
        self._share_compared = num_compared / 100
        self._read = _READ if is_service else ("/ping", "/health", "/ready", "/v1/models")

    def request(self, rng: Random) -> FuzzedRequest:
        served: tuple[Callable[[Random], FuzzedRequest], ...] = (
            *(self._valid,) * 22,
            *(self._read_only, self._read_only, self._tokens),
            *(self._pieces, self._pieces, self._chunks, self._kept, self._kept, self._resumed),
            *(self._resumed, self._left, self._left),
        )
        broken: tuple[Callable[[Random], FuzzedRequest], ...] = (
            *(self._wrong_fields,) * 5,
            *(self._odd_mix, self._odd_mix, self._broken_json, self._broken_json),
            *(self._wrong_headers, self._wrong_headers, self._wrong_target),
            *(self._wrong_chunks, self._wrong_length, self._cut, self._noise, self._wrong_key),
        )
        draw = rng.choice(served if rng.random() < 0.65 else broken)
        return replace(draw(rng), kind=draw.__name__.removeprefix("_"))

    def _post(self, path: str, body: object, *headers: bytes) -> bytes:
        return post(path, body, *self._key, *headers)

    def _get(self, path: str, *headers: bytes) -> bytes:
        return get(path, *self._key, *headers)

    def _valid_post(self, rng: Random) -> tuple[bytes, bytes | None]:
        """Returns a request, and perhaps its plain twin."""
        path, body = valid_body(rng)
        return self._post(path, body), self._plain(rng, path, body)

    def _plain(self, rng: Random, path: str, body: dict[str, Any]) -> bytes | None:
        is_compared = has_one_answer(body) and rng.random() < self._share_compared
        return self._post(path, plain_body(body)) if is_compared else None

    def _valid(self, rng: Random) -> FuzzedRequest:
        request, plain = self._valid_post(rng)
        return FuzzedRequest(segments=(request,), plain=plain, is_valid=True)

    def _read_only(self, rng: Random) -> FuzzedRequest:
        request = self._get(rng.choice(self._read))
        if rng.random() < 0.3:
            request = request.replace(b"GET", b"HEAD", 1)
        # As the first of two: only this way of reading knows that an answer to HEAD has no body.
        return FuzzedRequest(segments=(request,), others=(self._get("/ping"),), is_valid=True)

    def _tokens(self, rng: Random) -> FuzzedRequest:
        text = random_text(rng)
        request = rng.choice(
            [
                self._post("/tokenize", {"prompt": text, "add_special_tokens": None}),
                self._post("/tokenize", {"messages": [{"role": "user", "content": text}]}),
                self._post("/detokenize", {"tokens": [rng.randint(3, 250) for _ in text]}),
            ]
        )
        return FuzzedRequest(segments=(request,), is_valid=True)

    def _pieces(self, rng: Random) -> FuzzedRequest:
        request, plain = self._valid_post(rng)
        segments = tuple(_split(rng, request, pause_s=0.02))
        return FuzzedRequest(segments=segments, plain=plain, is_valid=True)

    def _chunked(self, rng: Random) -> tuple[bytes, ...]:
        path, body = valid_body(rng)
        content = json.dumps(body).encode()
        size = rng.choice([7, 1000])
        chunks = [chunk(content[i : i + size]) for i in range(0, len(content), size)]
        head = self._post(path, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        return (head, *chunks, b"0\r\n\r\n")

    def _chunks(self, rng: Random) -> FuzzedRequest:
        return FuzzedRequest(segments=self._chunked(rng), is_valid=True)

    def _wrong_chunks(self, rng: Random) -> FuzzedRequest:
        chunks = self._chunked(rng)
        wrong = rng.choice([b"zz\r\n", b"-1\r\n"])
        return FuzzedRequest(segments=(*chunks[: rng.randint(1, len(chunks) - 1)], wrong))

    def _kept(self, rng: Random) -> FuzzedRequest:
        """Several requests on one connection."""
        requests = [
            rng.choice([self._valid_post(rng)[0], self._get("/ping"), self._get("/v1/models")])
            for _ in range(rng.randint(2, 5))
        ]
        return FuzzedRequest(
            segments=(requests[0],),
            others=tuple(requests[1:]),
            pipelined=rng.random() < 0.5,
            is_valid=True,
        )

    def _resumed(self, rng: Random) -> FuzzedRequest:
        path, body = valid_body(rng)
        while path == RESPONSES:
            path, body = valid_body(rng)
        body = {**body, "stream": True}
        body.pop("prompt_logprobs", None)
        return FuzzedRequest(
            segments=(self._post(path, body, b"X-Eesd-Event-Ids: true"),),
            plain=self._post(path, plain_body(body)) if has_one_answer(body) else None,
            leaves_after=rng.randint(1, 6),
            is_valid=True,
        )

    def _left(self, rng: Random) -> FuzzedRequest:
        """Before the answer begins, or in the middle of it."""
        request, _ = self._valid_post(rng)
        return FuzzedRequest(segments=(request, _pause(rng, 0.5)), leaves=True)

    def _cut(self, rng: Random) -> FuzzedRequest:
        """Some clients wait for an answer, most leave."""
        request, _ = self._valid_post(rng)
        segments = _split(rng, request[: rng.randrange(len(request))], pause_s=0.1)
        return FuzzedRequest(segments=(*segments, _pause(rng, 0.5)), leaves=rng.random() < 0.8)

    def _wrong_length(self, rng: Random) -> FuzzedRequest:
        """Less than there is, which leaves a wrong next request, or more, and the client leaves."""
        request, _ = self._valid_post(rng)
        head, _, body = request.partition(b"\r\n\r\n")
        length = max(0, len(body) + rng.choice([-len(body), -5, -1, 1, 1000]))
        wrong_head = head.replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % length)
        segments = (wrong_head + b"\r\n\r\n" + body, _pause(rng, 0.5))
        return FuzzedRequest(segments=segments, leaves=length > len(body) and rng.random() < 0.9)

    def _wrong_fields(self, rng: Random) -> FuzzedRequest:
        body: dict[str, object] = {
            rng.choice(_FIELDS): rng.choice(_VALUES) for _ in range(rng.randint(0, 3))
        }
        if rng.random() < 0.8:
            messages = [{"role": "user"}]
            short = {"max_tokens": 4, "max_output_tokens": 4}
            body = {"prompt": "x", "messages": messages, "input": "x"} | short | body
        return FuzzedRequest(segments=(self._post(rng.choice(_PATHS), body),))

    def _odd_mix(self, rng: Random) -> FuzzedRequest:
        """Fields that are right, but perhaps not together, or at another endpoint."""
        path, body = valid_body(rng)
        body |= odd_fields(rng)
        if rng.random() < 0.3:
            path = rng.choice(_PATHS)
        if path == RESPONSES:
            body.setdefault("max_output_tokens", 4)
        return FuzzedRequest(segments=(self._post(path, body),))

    def _broken_json(self, rng: Random) -> FuzzedRequest:
        whole = bytearray(json.dumps({"prompt": random_text(rng), "max_tokens": 3}).encode())
        for _ in range(rng.randint(1, 5)):
            whole[rng.randrange(len(whole))] = rng.randrange(256)
        depth = rng.choice([10, 65, 900, 100_000])
        encoded = bytes(whole).decode("latin-1").encode(rng.choice(["utf-16", "utf-32"]))
        lists, objects = b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth
        nested = b'{"prompt":' + rng.choice([lists, objects]) + b',"x":' + lists + b"}"
        surrogate = b'{"prompt":"\\ud800 x\\udc00","max_tokens":2,"stop":"\\udfff"}'
        long = b'{"prompt":"x","seed":' + b"9" * rng.choice([30, 5000]) + b',"max_tokens":2}'
        bodies = (
            *(bytes(whole), lists, objects, nested, lists[:depth], b"NaN", b"", encoded, surrogate),
            *(long, b'{"prompt":"x","prompt":["y"],"max_tokens":1}', b"\xef\xbb\xbf{}"),
        )
        body = rng.choice(bodies)
        return FuzzedRequest(segments=(self._post(rng.choice(_PATHS), body),))

    def _wrong_headers(self, rng: Random) -> FuzzedRequest:
        headers = rng.sample(_HEADERS, rng.randint(1, 3))
        body = {"prompt": "x", "max_tokens": 3, "max_output_tokens": 3, "input": "x"}
        return FuzzedRequest(segments=(self._post(rng.choice(_PATHS), body, *headers),))

    def _wrong_target(self, rng: Random) -> FuzzedRequest:
        method, target = rng.choice(_METHODS), rng.choice(_TARGETS + _PATHS + self._read)
        line = f"{method} {target}".encode()
        request = self._post("/", {"prompt": "x", "max_tokens": 1}).replace(b"POST /", line, 1)
        # Left where the answer has no end that `exchange` knows of.
        return FuzzedRequest(
            segments=(request, _pause(rng, 0.2)), leaves=method in ("HEAD", "CONNECT")
        )

    def _wrong_key(self, rng: Random) -> FuzzedRequest:
        keys = (
            b"Bearer x",
            b"bearer fuzz",
            b"Basic Zm9v",
            b"Bearer",
            b"",
            b"Bearer " + b"x" * 9000,
        )
        request = post(
            rng.choice(_PATHS),
            {"prompt": "x", "max_tokens": 1},
            *[b"Authorization: " + rng.choice(keys) for _ in range(rng.randint(0, 2))],
        )
        return FuzzedRequest(segments=(request,))

    def _noise(self, rng: Random) -> FuzzedRequest:
        first = rng.choice([b"", b"GET ", b"POST /v1/completions HTTP/1.1\r\n", b"\x16\x03\x01"])
        return FuzzedRequest(segments=(first + rng.randbytes(rng.randint(1, 400)),))


def valid_request(rng: Random) -> bytes:
    """Returns a request that any service without a key serves."""
    return post(*valid_body(rng))


def _pause(rng: Random, longest_s: float) -> Part:
    return Part(data=b"", pause_s=rng.uniform(0.0, longest_s))


def _split(rng: Random, data: bytes, *, pause_s: float) -> list[Part]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    ends = [*cuts, len(data)]
    return [
        Part(data=data[a:b], pause_s=rng.uniform(0.0, pause_s))
        for a, b in zip([0, *cuts], ends, strict=True)
    ]
