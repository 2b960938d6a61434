"""Connections that stop in the middle of something end, in every state."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from serve_app.ingress import bounded_connection, gentle_transport
from serve_app.ingress.bounded_connection import BoundedConnection
from tests.support.live_server import serving
from tests.support.raw_http import Part, exchange, get, head

_BOUND_S = 0.4
_LATE_S = 3.0
_LARGE = 32 * 2**20
"""More than the buffers of a connection take."""
_READ = 256 * 2**10
"""The most that a connection of asyncio reads at once."""


async def _application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without the body, but for the path /body; an answer to /large is large."""
    if scope["path"] == "/body":
        while (await receive()).get("more_body"):
            pass
    headers = [(b"connection", b"close")] if scope["path"] == "/refused" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    num_chunks = 64 if scope["path"] == "/large" else 1
    for _ in range(num_chunks):
        chunk = b"a" * (_LARGE // 64 if num_chunks > 1 else 1)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(_application, protocol=BoundedConnection) as url,
    ):
        patch.setattr(bounded_connection, "HEAD_TIMEOUT_S", _BOUND_S)
        patch.setattr(bounded_connection, "BODY_PAUSE_S", _BOUND_S)
        patch.setattr(gentle_transport, "LINGER_S", _BOUND_S)
        patch.setattr(gentle_transport, "READER_PAUSE_S", _BOUND_S)
        yield urlsplit(url).port or 0


async def _seconds_until_closed(port: int, *chunks: bytes, drips: bool = False) -> float:
    """Sends the parts, then nothing or a byte at a time; returns when the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began_s = asyncio.get_running_loop().time()

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(_BOUND_S / 8)

    for chunk in chunks:
        writer.write(chunk)
        await asyncio.sleep(0.05)
    dripping = asyncio.ensure_future(drip() if drips else asyncio.sleep(0))
    try:
        async with asyncio.timeout(_LATE_S + 2):
            if drips:
                await asyncio.wait([dripping])  # a reset: the server reads no more
            while await reader.read(2**16):
                pass
    except ConnectionError:
        pass
    finally:
        dripping.cancel()
        writer.transport.abort()
    return asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("path", ["/refused", "/open"])
@pytest.mark.parametrize("drips", [False, True])
def test_an_answered_request_whose_body_does_not_come_ends(
    port: int, path: str, drips: bool
) -> None:
    request = head(path, 1_000_000)
    assert asyncio.run(_seconds_until_closed(port, request, b"x", drips=drips)) < _LATE_S


def test_a_body_that_stops_is_refused(port: int) -> None:
    reply = asyncio.run(exchange(port, head("/body", 100) + b"x", timeout_s=_LATE_S))
    assert (reply.status, reply.error["code"], reply.is_closed) == (408, "request_timeout", True)


def test_a_body_that_advances_is_not_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connection, "BODY_PAUSE_S", 1.0)
    drops = [Part(data=b"x", pause_s=0.15) for _ in range(10)]
    reply = asyncio.run(exchange(port, head("/body", 10), *drops, timeout_s=10.0))
    assert reply.status == 200
    assert reply.took_s > 1.0


def test_lines_after_a_chunked_body_do_not_keep_it_open(port: int) -> None:
    request = b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    drops = [Part(data=b"x", pause_s=_BOUND_S / 4) for _ in range(16)]
    reply = asyncio.run(exchange(port, request, *drops, timeout_s=_LATE_S))
    assert (reply.status, reply.is_closed) == (408, True)


def test_what_is_sent_after_an_answer_is_read_up_to_a_bound(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    receive = BoundedConnection.data_received

    def counting(connection: BoundedConnection, data: bytes) -> None:
        sizes.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(BoundedConnection, "data_received", counting)

    async def send() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("/refused", _LARGE))
        try:
            async with asyncio.timeout(_LATE_S):
                while True:
                    writer.write(b"x" * 2**16)
                    await writer.drain()
        finally:
            writer.transport.abort()

    with pytest.raises(ConnectionError):
        asyncio.run(send())
    # What the sockets hold is the kernel's. One read goes beyond each bound: of the request's body,
    # and of what is discarded.
    assert sum(sizes) < HIGH_WATER_LIMIT + gentle_transport.LINGER_BYTES + 2 * _READ


def test_a_client_that_still_sends_gets_its_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gentle_transport, "LINGER_S", 30.0)

    async def answer() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("/refused", 900_000))
        for _ in range(90):
            writer.write(b"x" * 10_000)
            await writer.drain()
            await asyncio.sleep(0.002)
        reply = await asyncio.wait_for(reader.read(), 20.0)
        writer.close()
        return reply

    assert asyncio.run(answer()).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_sends_all_before_it_reads_gets_its_answer_too(port: int) -> None:
    """As OpenAI's client does: the connection is reset long before the body is sent."""
    body = b"x" * 16 * gentle_transport.LINGER_BYTES
    assert httpx.post(f"http://127.0.0.1:{port}/refused", content=body).status_code == 200


@pytest.mark.parametrize("ends", [b"keep-alive", b"close"])
def test_a_client_that_does_not_read_its_answer_is_cut_off(port: int, ends: bytes) -> None:
    async def num_read() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(get("/large", b"Connection: " + ends))
        await asyncio.sleep(5 * _BOUND_S)
        num_bytes = 0
        try:
            async with asyncio.timeout(_LATE_S):
                while data := await reader.read(2**16):
                    num_bytes += len(data)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
        return num_bytes

    assert asyncio.run(num_read()) < _LARGE


def test_a_slow_reader_gets_all_of_its_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gentle_transport, "READER_PAUSE_S", 1.0)

    async def num_read() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**18)
        writer.write(get("/large", b"Connection: close"))
        num_bytes = 0
        while data := await reader.read(2**20):
            num_bytes += len(data)
            if num_bytes < 2**23:
                await asyncio.sleep(0.1)
        writer.close()
        return num_bytes

    assert asyncio.run(num_read()) > _LARGE
