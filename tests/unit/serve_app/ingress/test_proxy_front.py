"""What reaches Serve of the requests at its HTTP proxy."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from ray.serve._private import constants
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from serve_app.ingress.bounded_connection import BoundedConnection
from serve_app.openai.context import LAST_EVENT_ID_HEADER, REQUEST_ID_HEADER
from serve_app.openai.middleware.body_limits import LIMIT_HEADER
from serve_app.openai.middleware.head_gate import HeadGate, forwarded
from serve_app.openai.workloads import WORKLOAD_HEADER
from tests.support.live_server import serving
from tests.support.raw_http import Part, Reply, chunk, chunked_head, exchange, get, head, post

_OF_RAY = (
    constants.SERVE_MULTIPLEXED_MODEL_ID,
    constants.SERVE_SESSION_ID,
    constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    f"{constants.SERVE_INGRESS_ROUTER_HEADER_PREFIX}a",
)
_LIMIT = 1000


@dataclass
class _Serve:
    """Stands where Serve's proxy stands: notes what it gets, and states the limit of bodies of an
    application under /served."""

    headers: list[dict[str, list[str]]] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    limit: int = _LIMIT

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Request(scope).headers
        self.headers.append({name: headers.getlist(name) for name in headers})
        self.num_bytes.append(0)
        is_ours = scope["path"].startswith("/served/")
        if is_ours:
            scope["root_path"] = "/served"
        message: Message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            self.num_bytes[-1] += len(message.get("body", b""))
            if is_ours and self.num_bytes[-1] > self.limit:
                break
        reply_headers = [(LIMIT_HEADER, b"%d" % self.limit)] if is_ours else []
        status = 413 if is_ours and self.num_bytes[-1] > self.limit else 200
        reply_headers.append((b"content-length", b"6"))
        await send({"type": "http.response.start", "status": status, "headers": reply_headers})
        await send({"type": "http.response.body", "body": b"served"})


@pytest.fixture
def serve() -> _Serve:
    return _Serve()


@pytest.fixture
def port(serve: _Serve) -> Iterator[int]:
    with serving(HeadGate(serve), protocol=BoundedConnection) as url:
        yield urlsplit(url).port or 0


def _reply(port: int, *chunks: Part | bytes) -> Reply:
    return asyncio.run(exchange(port, *chunks, timeout_s=5.0))


@pytest.mark.parametrize("name", _OF_RAY)
def test_headers_that_serve_acts_on_do_not_reach_it(port: int, serve: _Serve, name: str) -> None:
    spellings = {name, name.replace("_", "-"), name.replace("-", "_"), name.upper(), name.title()}
    lines = [spelling.encode() + b": 1" for spelling in sorted(spellings)]
    assert _reply(port, get("/", *lines, *lines)).status == 200
    assert set(serve.headers[0]) == {"host"}


def test_what_the_service_reads_passes_once(port: int, serve: _Serve) -> None:
    names = (
        REQUEST_ID_HEADER,
        LAST_EVENT_ID_HEADER,
        WORKLOAD_HEADER,
        "Authorization",
        "traceparent",
    )
    first = [f"{name}: first".encode() for name in names]
    second = [f"{name.upper()}: second".encode() for name in names]
    underscores = [f"{name.replace('-', '_')}: third".encode() for name in names if "-" in name]
    assert _reply(port, get("/", *underscores, *first, *second)).status == 200
    assert serve.headers[0] == {name.lower(): ["first"] for name in names} | {"host": ["x"]}


def test_no_header_is_forwarded_that_serve_keeps() -> None:
    assert forwarded([(name.encode(), b"1") for name in _OF_RAY]) == []


def test_a_length_that_the_service_refuses_does_not_reach_it(port: int, serve: _Serve) -> None:
    path = "/served/v1/completions"
    assert _reply(port, post(path, b"x" * (_LIMIT + 1))).status == 413
    assert len(serve.num_bytes) == 1, "nothing is known before the first answer"
    reply = _reply(port, head(path, _LIMIT + 1))
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert reply.is_closed
    assert len(serve.num_bytes) == 1
    assert _reply(port, post(path, b"x" * _LIMIT)).status == 200


def test_the_limit_is_that_of_the_latest_answer_and_of_one_application(
    port: int, serve: _Serve
) -> None:
    path = "/served/v1/completions"
    reply = _reply(port, get("/served/ping"))
    assert reply.header(LIMIT_HEADER.decode()) is None
    for other in ("/v1/completions", "/other/v1/completions", "/served/ping"):
        assert _reply(port, post(other, b"x" * (_LIMIT + 1))).body == b"served"
    assert serve.num_bytes[1:] == [_LIMIT + 1] * 3
    serve.limit = 2 * _LIMIT
    _reply(port, get("/served/ping"))
    assert _reply(port, post(path, b"x" * 2 * _LIMIT)).status == 200
    assert _reply(port, head(path, 2 * _LIMIT + 1)).status == 413


def test_chunks_beyond_the_limit_do_not_reach_the_service(port: int, serve: _Serve) -> None:
    _reply(port, get("/served/ping"))
    chunks = [Part(data=chunk(b"x" * 400), pause_s=0.01) for _ in range(50)]
    reply = _reply(port, chunked_head("/served/v1/completions"), *chunks)
    assert reply.status == 413
    assert _LIMIT < serve.num_bytes[-1] <= 2 * _LIMIT
