"""Server-sent events, as OpenAI's clients read them.

One `data:` line per object, with the `id:` from which it can be resumed, `[DONE]` exactly once at
the end, errors inside the stream once it has begun, comments while there is nothing to send. When
the client leaves, the source of the events is closed at once, not when the next event would have
been sent.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from serve_app.openai.answers import Event
from serve_app.openai.errors import http_error_of
from serve_app.openai.logprobs import LazyList

T = TypeVar("T")
Events = AsyncGenerator[Event, None]

DONE = b"data: [DONE]\n\n"
RESUMED = b": resumed\n\n"
"""Begins a resumed stream: what was shown before is still being made, and nothing can be sent."""

KEEP_ALIVE_S = 10.0
"""Interval of comments while there is no token: proxies close connections that are silent."""

# A pipeline that drains ends its streams itself, with their last token.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


_LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Line breaks of Unicode that JSON leaves as they are, and clients split lines at."""


_LEVELS = 4
"""Levels of an answer: itself, its choices, one choice, its log-probabilities."""
_NUM_LISTED_AT_ONCE = 16
_NUM_AT_ONCE = 1024
"""Entries of a list, `LazyList` or plain, that are encoded in one call, which holds the
interpreter's lock."""
_REST_S = 0.0005
"""Pause after such a call. Without it the event loop would get the lock after 5 ms, at every system
call that it makes."""


def encoded(content: object) -> bytes:
    """Returns JSON of one line in UTF-8; half surrogates from the input stay escaped."""
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain_list
    )
    return text.translate(_LINE_BREAKS).encode("utf-8", errors="backslashreplace")


def _plain_list(value: object) -> list[object]:
    if isinstance(value, LazyList):
        return value[:]
    raise TypeError(f"{value!r} is not JSON")


def encoded_in_parts(content: Mapping[str, object]) -> bytes:
    """Returns the same bytes as `encoded`, in many short steps: for large answers, in a thread that
    holds no other up."""
    return b"".join(_parts(content, levels=_LEVELS))


def _parts(value: object, *, levels: int) -> Iterator[bytes]:
    if isinstance(value, Mapping) and value and levels > 0:
        opening = b"{"
        for key, inner in value.items():
            yield opening + encoded(key) + b":"
            yield from _parts(inner, levels=levels - 1)
            opening = b","
        yield b"}"
    elif isinstance(value, list | LazyList) and value:
        opening = b"["
        step = _NUM_LISTED_AT_ONCE if isinstance(value, LazyList) else _NUM_AT_ONCE
        for at in range(0, len(value), step):
            time.sleep(_REST_S)
            some = value[at : at + step]
            if levels > 0 and isinstance(some[0], Mapping):
                for inner in some:
                    yield opening
                    yield from _parts(inner, levels=levels - 1)
                    opening = b","
            else:
                yield opening + encoded(some)[1:-1]
                opening = b","
        yield b"]"
    else:
        yield encoded(value)


def written(event: Event) -> bytes:
    if event.content is None:
        return RESUMED
    data = b"data: " + encoded(event.content) + b"\n\n"
    if event.name:
        data = b"event: " + event.name + b"\n" + data
    return b"id: " + event.id + b"\n" + data if event.id else data


async def while_listened_to(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Does the work; cancels it and raises ClientDisconnect when the client leaves."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(EventSourceResponse):
    """Sends events until they end or the client leaves, and closes their source either way."""

    def __init__(self, first: Event, events: Events) -> None:
        """`first` is known before the stream begins: earlier errors get an HTTP status instead."""
        super().__init__(
            _events(first, events),
            headers={"Cache-Control": "no-cache"},
            sep="\n",
            ping=KEEP_ALIVE_S,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _events(first: Event, events: Events) -> AsyncGenerator[bytes, None]:
    yield written(first)
    try:
        async for event in events:
            yield written(event)
    except Exception as error:  # the status is sent already: the stream carries the error
        yield written(Event(http_error_of(error).body))
    if not first.name:  # else the last event says that it is the last
        yield DONE
