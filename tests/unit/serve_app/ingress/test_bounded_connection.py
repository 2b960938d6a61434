"""The server of Ray's proxy, with heads bounded in time and size."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serve_app.ingress import bounded_connection
from serve_app.ingress.bounded_connection import BoundedConnection
from serve_app.openai.middleware.head_gate import MAX_HEAD_BYTES, HeadGate
from tests.support.live_server import serving
from tests.support.raw_http import Part, Reply, chunk, chunked_head, exchange, exchanges, get, post

_SLOW_S = 0.8


async def _answer(request: Request) -> Response:
    body = await request.body()
    if request.url.path == "/length":
        return PlainTextResponse(str(len(body)))
    await asyncio.sleep(_SLOW_S if request.url.path == "/slow" else 0)
    return PlainTextResponse("served")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(bounded_connection, "HEAD_TIMEOUT_S", 0.4)
    app = Starlette(routes=[Route("/{path:path}", _answer, methods=["GET", "POST"])])
    with serving(HeadGate(app), protocol=BoundedConnection) as url:
        number = urlsplit(url).port
        assert number is not None
        yield number


def _reply(port: int, *chunks: Part | bytes) -> Reply:
    return asyncio.run(exchange(port, *chunks, timeout_s=5.0))


def test_a_head_that_does_not_end_is_answered_and_closed(port: int) -> None:
    for chunks in (
        [b"GET / HTTP/1.1\r\nHos"],
        [b"GET /", *(Part(data=b"a", pause_s=0.1) for _ in range(40))],
        [b"GET / HTTP/1.1\r\n", *(Part(data=b"a: b\r\n", pause_s=0.1) for _ in range(40))],
    ):
        reply = _reply(port, *chunks)
        assert reply.error["code"] == "request_timeout"
        assert (reply.status, reply.is_closed) == (408, True)
        assert reply.took_s < 2.0


def test_a_connection_without_a_byte_is_closed(port: int) -> None:
    reply = _reply(port)
    assert (reply.raw, reply.is_closed) == (b"", True)
    assert reply.took_s < 2.0


def test_the_second_head_of_a_connection_has_the_same_deadline(port: int) -> None:
    async def second() -> tuple[bytes, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/"))
        assert b"served" in await reader.readuntil(b"served")
        await asyncio.sleep(0.6)  # idle between requests: the keep-alive time applies
        began_s = asyncio.get_running_loop().time()
        writer.write(b"GET / HTTP/1.1\r\nHo")
        reply = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return reply, asyncio.get_running_loop().time() - began_s

    reply, took_s = asyncio.run(second())
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert 0.3 < took_s < 2.0


def test_a_large_head_is_refused_as_it_arrives(port: int) -> None:
    reply = _reply(port, b"GET / HTTP/1.1\r\nx: ", *[b"a" * 1000] * (MAX_HEAD_BYTES // 1000 + 1))
    assert (reply.status, reply.is_closed) == (431, True)


def test_an_answer_may_take_longer_than_a_head(port: int) -> None:
    for request in (get("/slow"), post("/slow", {"a": "x" * 200_000})):
        reply = _reply(port, request)
        assert reply.raw.endswith(b"served")
        assert reply.took_s > _SLOW_S
    slow_body = [Part(data=b"x", pause_s=0.1) for _ in range(8)]
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n"
    assert _reply(port, head, *slow_body).raw.endswith(b"served")


def test_headers_that_are_not_text_and_websockets_are_refused(port: int) -> None:
    assert _reply(port, get("/", b"X-Name: \xff")).status == 400
    assert _reply(port, get("/a%0Ab")).status == 400
    assert _reply(port, get("*")).status == 400
    assert _reply(port, get("/", b"X-Name: \x1b[0m")).error["type"] == "invalid_request_error"
    assert _reply(port, get("/", b"X-Request-Id: a b")).status == 400
    upgrade = (b"Connection: Upgrade", b"Upgrade: websocket")
    handshake = (b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    for request in (
        get("/", *upgrade, *handshake),
        get("/", *upgrade),
        post("/", {"a": 1}, *upgrade, *handshake),
    ):
        reply = _reply(port, request)
        assert (reply.status, reply.is_closed) == (400, True)


@pytest.mark.parametrize("body", [b"{}", b"x" * 200_000])
def test_a_request_that_offers_another_protocol_is_served_by_this_one(
    port: int, body: bytes
) -> None:
    offers = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
    whole = post("/length", body, *offers)
    chunks = [chunk(body[i : i + 50_000]) for i in range(0, len(body), 50_000)]
    offered = chunked_head("/length").replace(b"\r\n\r\n", b"\r\n")
    in_chunks = [b"\r\n".join([offered + offers[0], *offers[1:], b"\r\n"]), *chunks, b"0\r\n\r\n"]
    for request in ([whole], [whole[:30], Part(data=whole[30:], pause_s=0.1)], in_chunks):
        assert _reply(port, *request).body == b"%d" % len(body)
    pair = (whole, get("/slow"))
    for pipelined in (True, False):
        replies = asyncio.run(exchanges(port, *pair, pipelined=pipelined, timeout_s=5.0))
        assert [reply.body for reply in replies] == [b"%d" % len(body), b"served"]


_H2C = (b"Connection: Upgrade", b"Upgrade: h2c")


def test_many_offers_of_one_read_are_served_in_order(port: int) -> None:
    requests = [post("/length", b"x" * size, *_H2C) for size in range(1, 21)]
    replies = asyncio.run(exchanges(port, *requests, pipelined=True, timeout_s=5.0))
    assert [reply.body for reply in replies] == [b"%d" % size for size in range(1, 21)]


def test_a_head_that_is_parsed_again_cannot_shift_what_follows(port: int) -> None:
    short = b"GET / HTTP/1.1\r\nUpgrade:a\r\nConnection:upgrade\r\nHost:x\r\n\r\n"
    for padding in range(0, 40):
        long = b"GET / HTTP/1.1\r\nUpgrade:" + b"a" * padding + short[25:]
        replies = asyncio.run(exchanges(port, long, short, pipelined=True, timeout_s=5.0))
        assert [reply.body for reply in replies] == [b"served", b"served"], padding


@pytest.mark.parametrize(
    "offer",
    [
        (b"Connection: Upgrade", b"Connection: keep-alive", b"Upgrade: h2c"),
        (b"Proxy-Connection: Upgrade", b"Upgrade: h2c"),
        (b"Connection: keep-alive, Upgrade", b"Upgrade: h2c", b"Upgrade: other"),
    ],
)
def test_a_body_is_never_taken_for_a_request(port: int, offer: tuple[bytes, ...]) -> None:
    smuggled = get("/length")
    whole = post("/length", smuggled, *offer)
    head = whole[: -len(smuggled)]
    for chunks in ([whole], [head, Part(data=smuggled, pause_s=0.1)]):
        reply = _reply(port, *chunks)
        assert reply.body == b"%d" % len(smuggled)


def test_an_offer_keeps_the_version_and_the_end_of_the_connection(port: int) -> None:
    old = get("/", *_H2C).replace(b"HTTP/1.1", b"HTTP/1.0")
    for request in (old, get("/", b"Connection: close, Upgrade", b"Upgrade: h2c")):
        reply = _reply(port, request)
        assert (reply.body, reply.is_closed) == (b"served", True)


def test_connect_is_refused(port: int) -> None:
    reply = _reply(port, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", get("/"))
    assert (reply.status, reply.is_closed) == (400, True)


@pytest.mark.parametrize(
    ("second", "status"),
    [
        (get("/", b"Connection: Upgrade", b"Upgrade: websocket"), 400),
        (b"\x00\x01\r\n", 400),
        (chunked_head("/") + b"zz\r\n", 400),
        (b"GET /" + b"a" * 2 * MAX_HEAD_BYTES, 431),
    ],
)
def test_a_refusal_waits_for_the_answers_before_it(port: int, second: bytes, status: int) -> None:
    replies = asyncio.run(exchanges(port, get("/slow"), second, pipelined=True, timeout_s=5.0))
    assert [reply.status for reply in replies] == [200, status]
    assert replies[1].is_closed


def test_what_follows_a_chunked_body_is_bounded(port: int) -> None:
    trailers = [b"x-%d: " % i + b"a" * 1000 + b"\r\n" for i in range(2 * MAX_HEAD_BYTES // 1000)]
    reply = _reply(port, chunked_head("/"), chunk(b"ab"), b"0\r\n", *trailers)
    assert reply.is_closed
    assert reply.took_s < 2.0


def test_a_large_head_behind_a_request_in_progress_is_bounded(port: int) -> None:
    second = [b"GET /", *[b"a" * 1000] * (2 * MAX_HEAD_BYTES // 1000)]
    reply = _reply(port, get("/slow"), *second)
    assert reply.raw.startswith(b"HTTP/1.1 200 ")
    assert reply.raw.count(b"HTTP/1.1 431 ") == reply.is_closed == 1


def test_a_request_may_wait_behind_another_and_be_sent_in_chunks(port: int) -> None:
    body = [chunk(bytes([97 + i % 26])) for i in range(100)]
    requests = (get("/slow"), chunked_head("/"), *body, b"0\r\n\r\n")

    async def answers() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in requests:
            writer.write(request)
            await writer.drain()
        raw = b""
        while raw.count(b"served") < 2:
            raw += await asyncio.wait_for(reader.read(1000), 5)
        writer.close()
        return raw

    assert asyncio.run(answers()).count(b"HTTP/1.1 200 ") == 2
