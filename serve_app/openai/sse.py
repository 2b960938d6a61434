"""Server-sent events, as OpenAI's clients read them.

One `data:` line per object, `[DONE]` exactly once at the end, errors inside the stream once it
has begun. The stream ends with its client: when the client leaves, what makes the events is
closed at once, not when the next event would have been sent.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.openai.errors import http_error_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
Objects = AsyncGenerator[Mapping[str, object], None]

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def encoded(content: Mapping[str, object]) -> bytes:
    """JSON in UTF-8; half surrogates out of somebody's input stay escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace")


def event(content: Mapping[str, object]) -> bytes:
    return b"data: " + encoded(content) + b"\n\n"


async def while_listened_to(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Does the work, and breaks it off with ClientGone when the client leaves."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events until they end or the client leaves, and closes their source either way."""

    media_type = "text/event-stream"

    def __init__(self, first: Mapping[str, object], rest: Objects) -> None:
        """The first object is there already: what fails earlier gets a real status instead."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_listened_to(receive, lambda: self._send_all(send))
        except ClientGone:
            logger.info("client left a stream")
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await _send(event(self._first), send)
        try:
            async for content in self._rest:
                await _send(event(content), send)
        except Exception as error:  # the status has left: the stream itself has to say it
            await _send(event(http_error_of(error).body), send)
        await _send(DONE, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(chunk: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
