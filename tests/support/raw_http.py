"""An HTTP client that sends any bytes at any pace, for attacks and fuzzing."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_CONTINUE = b"HTTP/1.1 100 "
_JSON = b"Content-Type: application/json\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes to send, after a pause."""

    data: bytes
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back on one connection."""

    raw: bytes
    is_closed: bool
    """Whether the server closed the connection."""
    took_s: float

    @property
    def status(self) -> int | None:
        """None without an answer."""
        return int(self.raw.split(b" ", 2)[1]) if self.raw else None

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error

    @property
    def body(self) -> bytes:
        """Of the first answer, if there are several."""
        body = self.raw.split(b"\r\n\r\n", 1)[1]
        if self.header("transfer-encoding") == "chunked":
            return b"".join(_dechunked(body))
        length = self.header("content-length")
        return body if length is None else body[: int(length)]

    @property
    def is_stream(self) -> bool:
        return (self.header("content-type") or "").startswith("text/event-stream")

    @property
    def events(self) -> list[tuple[str, bytes]]:
        """Complete events of a stream: id and data, without comments."""
        events: list[tuple[str, bytes]] = []
        for block in self.body.split(b"\n\n")[:-1]:
            lines = [line.partition(b": ") for line in block.split(b"\n") if line[:1] != b":"]
            fields = {name: value for name, _, value in lines}
            if b"data" in fields:
                events.append((fields.get(b"id", b"").decode(), fields[b"data"]))
        return events

    def header(self, name: str) -> str | None:
        head = self.raw.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")[1:]
        pairs = (line.split(": ", 1) for line in head)
        return next((value for key, value in pairs if key.lower() == name), None)


async def exchange(
    port: int, *segments: Part | bytes, timeout_s: float = 20.0, leaves: bool = False
) -> Reply:
    """Sends the parts on one connection and returns the first answer; with `leaves`, closes the
    connection without reading. Raises TimeoutError if there is neither an answer nor an end."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw, is_closed = b"", False
    try:
        async with asyncio.timeout(timeout_s):
            sending = asyncio.ensure_future(_sent(writer, segments))
            if leaves:
                await sending
            else:
                raw, is_closed = await _answer(reader)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    finally:
        writer.transport.abort()
    return Reply(raw=raw, is_closed=is_closed, took_s=loop.time() - began_s)


async def exchanges(
    port: int, *requests: bytes, pipelined: bool, timeout_s: float = 20.0
) -> list[Reply]:
    """Sends the requests on one connection, all at once or each after the answer to the one
    before. Returns the answers until the server closes it. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    replies: list[Reply] = []
    try:
        async with asyncio.timeout(timeout_s):
            if pipelined:
                writer.write(b"".join(requests))
            for request in requests:
                if not pipelined:
                    writer.write(request)
                raw = await _framed(reader, is_head=request.startswith(b"HEAD "))
                is_closed = not raw or b"\r\nconnection: close" in raw.lower()
                replies.append(Reply(raw=raw, is_closed=is_closed, took_s=loop.time() - began_s))
                if is_closed:
                    break
    finally:
        writer.transport.abort()
    return replies


async def events_until(port: int, request: bytes, *, num_ids: int, timeout_s: float) -> Reply:
    """Sends a request for a stream, and leaves after so many events with an id, or at its end."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = b""
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(request)
            async for data in _received(reader):
                raw += data
                reply = Reply(raw=raw, is_closed=True, took_s=loop.time() - began_s)
                if b"\r\n\r\n" not in raw:
                    continue
                if _is_complete(bytearray(raw)):
                    break
                if reply.is_stream and sum(bool(name) for name, _ in reply.events) >= num_ids:
                    break
    finally:
        writer.transport.abort()
    return Reply(raw=raw, is_closed=True, took_s=loop.time() - began_s)


def get(path: str, *headers: bytes) -> bytes:
    return b"GET " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n" + _lines(headers) + b"\r\n"


def post(path: str, body: object, *headers: bytes) -> bytes:
    """Returns a request; a body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, len(content), *headers) + content


def head(path: str, num_bytes: int, *headers: bytes) -> bytes:
    """Returns a request without its body of `num_bytes`."""
    length = b"Content-Length: %d\r\n" % num_bytes
    return _posted(path) + length + _lines(headers) + b"\r\n"


def chunked_head(path: str) -> bytes:
    return _posted(path) + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def _posted(path: str) -> bytes:
    return b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n" + _JSON


def _lines(headers: Sequence[bytes]) -> bytes:
    return b"".join(header + b"\r\n" for header in headers)


def _dechunked(body: bytes) -> Iterator[bytes]:
    while b"\r\n" in body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


async def _sent(writer: asyncio.StreamWriter, segments: Sequence[Part | bytes]) -> None:
    for segment in segments:
        if isinstance(segment, Part):
            await asyncio.sleep(segment.pause_s)
        writer.write(segment.data if isinstance(segment, Part) else segment)
        await writer.drain()


async def _answer(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """Returns the first answer, and whether the connection was closed after it."""
    raw = bytearray()
    try:
        async for data in _received(reader):
            raw += data
            if raw.startswith(_CONTINUE) and b"\r\n\r\n" in raw:
                del raw[: raw.index(b"\r\n\r\n") + 4]
            if _is_complete(raw):
                return bytes(raw), b"connection: close" in bytes(raw).lower()
    except ConnectionError:
        pass
    return bytes(raw), True


async def _framed(reader: asyncio.StreamReader, *, is_head: bool) -> bytes:
    """Returns one answer and no more; what there is of it if the connection ends."""
    answer = b""
    try:
        head_ = _CONTINUE
        while head_.startswith(_CONTINUE):
            head_ = await reader.readuntil(b"\r\n\r\n")
        answer, lower = head_, head_.lower()
        if is_head or lower.split(b" ", 2)[1] in (b"204", b"304"):
            return answer
        if b"\r\ntransfer-encoding: chunked" in lower:
            size = 1
            while size:
                line = await reader.readuntil(b"\r\n")
                size = int(line, 16)
                answer += line + await reader.readexactly(size + 2)
            return answer
        length = re.search(rb"\r\ncontent-length: (\d+)", lower)
        return answer + (
            await reader.readexactly(int(length[1])) if length else await reader.read()
        )
    except (asyncio.IncompleteReadError, ConnectionError):
        return answer


async def _received(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65536):
        yield data


def _is_complete(raw: bytearray) -> bool:
    head_, separator, body = bytes(raw).partition(b"\r\n\r\n")
    if not separator:
        return False
    lines = head_.lower().split(b"\r\n")
    for line in lines:
        if line.startswith(b"content-length: "):
            return len(body) >= int(line.removeprefix(b"content-length: "))
    return body.endswith(b"0\r\n\r\n")
