"""Requests that are no HTTP, or of which two readers could make different ones: each gets one
answer and the end of its connection, and no application reads it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from serve_app.ingress.bounded_connection import BoundedConnection
from serve_app.openai.middleware.head_gate import HeadGate
from tests.support.live_server import serving
from tests.support.raw_http import exchange, get

_LENGTH = b"Content-Length: 5"
_CHUNKED = b"Transfer-Encoding: chunked"
_NEXT = get("/next")
"""Follows each: a body must never become a request."""


def _post(*headers: bytes, body: bytes = b"aaaaa", version: bytes = b"1.1") -> bytes:
    lines = [b"POST / HTTP/" + version, b"Host: x", *headers, b"", b""]
    return b"\r\n".join(lines) + body


def _chunked(body: bytes) -> bytes:
    return _post(_CHUNKED, body=body)


def _get(target: bytes = b"/", *headers: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join([b"GET " + target + b" " + version, b"Host: x", *headers, b"", b""])


_END = b"0\r\n\r\n"
MALFORMED = {
    "a length and chunks": _post(_LENGTH, _CHUNKED, body=_END),
    "chunks and a length": _post(_CHUNKED, _LENGTH, body=_END),
    "two lengths": _post(_LENGTH, b"Content-Length: 6"),
    "the same length twice": _post(_LENGTH, _LENGTH),
    "a length with a sign": _post(b"Content-Length: +5"),
    "a negative length": _post(b"Content-Length: -5"),
    "a list of lengths": _post(b"Content-Length: 5, 5"),
    "a length of too many digits": _post(b"Content-Length: " + b"9" * 30),
    "an empty length": _post(b"Content-Length: "),
    "a hexadecimal length": _post(b"Content-Length: 0x5"),
    "a length with an underscore": _post(b"Content-Length: 5_0"),
    "a blank before the colon of a length": _post(b"Content-Length : 5"),
    "a chunk size that is no number": _chunked(b"zz\r\nab\r\n" + _END),
    "a negative chunk size": _chunked(b"-1\r\nab\r\n" + _END),
    "a chunk size with a sign": _chunked(b"+2\r\nab\r\n" + _END),
    "a chunk size with a prefix": _chunked(b"0x2\r\nab\r\n" + _END),
    "a chunk size of too many digits": _chunked(b"f" * 20 + b"\r\nab\r\n" + _END),
    "no chunk size": _chunked(b"\r\nab\r\n" + _END),
    "a blank after a chunk size": _chunked(b"2 \r\nab\r\n" + _END),
    "a chunk without an end": _chunked(b"2\r\nabX\r\n" + _END),
    "a chunk of more than its size": _chunked(b"2\r\nabcd\r\n" + _END),
    "chunks with bare line feeds": _chunked(b"2\nab\n0\n\n"),
    "a line feed in a chunk extension": _chunked(b"2;\nxx\r\nab\r\n" + _END),
    "a long chunk extension": _chunked(b"2;a=" + b"b" * 150_000 + b"\r\nab\r\n" + _END),
    "a trailer without a colon": _chunked(b"2\r\nab\r\n0\r\nbad trailer\r\n\r\n"),
    "a coding that is not chunked": _post(b"Transfer-Encoding: gzip"),
    "a coding before chunked": _post(b"Transfer-Encoding: gzip, chunked", body=_END),
    "a coding after chunked": _post(b"Transfer-Encoding: chunked, gzip", body=_END),
    "a coding like chunked": _post(b"Transfer-Encoding: xchunked", body=_END),
    "a coding in quotes": _post(b'Transfer-Encoding: "chunked"', body=_END),
    "chunked after a control character": _post(b"Transfer-Encoding: \x0bchunked", body=_END),
    "chunked twice": _post(_CHUNKED, _CHUNKED, body=_END),
    "chunked and identity": _post(_CHUNKED, b"Transfer-Encoding: identity", body=_END),
    "identity": _post(b"Transfer-Encoding: identity", body=_END),
    "chunks in HTTP/1.0": _post(_CHUNKED, body=_END, version=b"1.0"),
    "chunks in HTTP/2.0": _post(_CHUNKED, body=_END, version=b"2.0"),
    "bare line feeds": b"GET / HTTP/1.1\nHost: x\n\n",
    "bare carriage returns": b"GET / HTTP/1.1\rHost: x\r\r",
    "a line feed in a header": _get(b"/", b"A: b\nC: d"),
    "a carriage return in a header": _get(b"/", b"A: b\rc"),
    "a folded header": _get(b"/", b"A: b", b" c"),
    "a blank before a colon": _get(b"/", b"A : b"),
    "a NUL in a value": _get(b"/", b"A: b\x00c"),
    "a NUL in a name": _get(b"/", b"A\x00: b"),
    "an empty name": _get(b"/", b": b"),
    "a line without a colon": _get(b"/", b"Ab"),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2.0": _get(version=b"HTTP/2.0"),
    "HTTP/1.2": _get(version=b"HTTP/1.2"),
    "a version of two digits": _get(version=b"HTTP/1.11"),
    "a version in lower case": _get(version=b"http/1.1"),
    "an unknown method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in lower case": b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a URL without a host": _get(b"http:///a"),
    "a URL of a wrong port": _get(b"http://x:99999/"),
    "an authority": _get(b"x:80"),
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target without a slash": _get(b"foo"),
    "a target of a query alone": _get(b"?a"),
    "a target that is not ASCII": _get("/é".encode()),
    "a tab in place of blanks": b"GET\t/\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": _get(b"/", b"Host: y"),
    "a host with a blank": b"GET / HTTP/1.1\r\nHost: x y\r\n\r\n",
    "a host with a path": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "a greeting of TLS": bytes.fromhex("16030100a5010000a10303"),
    "zeros": b"\x00\x01\x02\r\n\r\n",
}
_STATUS = {"a long chunk extension": 431}


@dataclass
class _Application:
    """Reads whole bodies."""

    read: list[tuple[str, int]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        self.read.append((scope["path"], len(body)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})


@pytest.fixture(scope="module")
def application() -> _Application:
    return _Application()


@pytest.fixture(scope="module")
def port(application: _Application) -> Iterator[int]:
    with serving(HeadGate(application), protocol=BoundedConnection) as url:
        yield urlsplit(url).port or 0


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_gets_one_answer_and_no_reader(
    port: int, application: _Application, name: str
) -> None:
    application.read.clear()
    reply = asyncio.run(exchange(port, MALFORMED[name] + _NEXT, timeout_s=5.0))
    assert reply.raw.count(b"HTTP/1.1 ") == 1
    assert (reply.status, reply.is_closed) == (_STATUS.get(name, 400), True)
    assert reply.error["type"] == "invalid_request_error"
    assert application.read == []


@pytest.mark.parametrize("name", [name for name in MALFORMED if name.endswith(("size", "number"))])
def test_a_body_that_turns_out_wrong_later_is_answered_too(
    port: int, application: _Application, name: str
) -> None:
    application.read.clear()
    head, body = MALFORMED[name].split(b"\r\n\r\n", 1)

    async def slowly() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"\r\n\r\n1\r\na\r\n")
        await asyncio.sleep(0.05)
        writer.write(body)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return answer

    assert asyncio.run(slowly()).startswith(b"HTTP/1.1 400 ")
    assert application.read == []
