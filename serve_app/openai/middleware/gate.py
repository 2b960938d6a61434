"""The admission gate: what a request must pass before anything parses it.

Headers are checked first, then the API key and its limits, then the body: its size, the time it
takes to arrive, and the nesting of its JSON. A refusal is logged by `RefusalLog`, and closes the
connection, since the rest of the body may still be under way.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from itertools import chain

from starlette._utils import get_route_path
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd_dist.errors import CapacityError, EesdError, RequestError
from eesd_dist.routing.quotas import Standing
from serve_app.console.pages import PATHS as PAGES
from serve_app.keys import ANYONE, ApiKey, KeyRing, Permit
from serve_app.openai.errors import (
    BodyTooLarge,
    HeadTooLarge,
    KeysUnknown,
    NotAnOperator,
    TooSlow,
    UnknownKey,
    http_error_of,
)
from serve_app.openai.limits import Limits
from serve_app.openai.middleware.http_metrics import note_refusal
from serve_app.openai.middleware.permits import (
    Quotas,
    check_standing,
    note_permit,
    rate_limit_headers,
)
from serve_app.openai.middleware.refusal_log import RefusalLog
from serve_app.openai.middleware.request_ids import leave_out_of_log
from serve_app.openai.schema import REQUEST_ID_PATTERN, check_json
from serve_app.openai.sse import encoded

MAX_HEAD_BYTES = 64 * 2**10
_MAX_BODIES_IN_MEMORY = 64
"""Bodies of full size that may be incomplete at the same time."""
_SMALL_BODY_BYTES = 64 * 2**10
"""Smaller bodies are read however many large ones are held back."""
_DISCARD_BYTES = 64 * 2**20
_DISCARD_S = 2.0
_LOGGED_CHARS = 120
OPEN_PATHS = frozenset({"/health", "/metrics", "/ping", "/ready", "/version"}) | PAGES
"""Paths for probes, scrapers and browsers that open a page, which send no key."""
OPERATORS = "/debug/"
"""Paths that need an operator's key."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN.encode())


class HeadGate:
    """ASGI middleware that refuses headers and paths which are not plain text, and WebSockets.

    Ray's HTTP proxy runs it too: it would answer such headers with 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] == "http":
            try:
                check_head(scope)
            except RequestError as error:
                await refusal(error, scope, log=self._log)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AdmissionGate:
    """ASGI middleware around the whole API. With `keys` None no key is required."""

    def __init__(
        self, app: ASGIApp, *, limits: Limits, keys: KeyRing | None, quotas: Quotas | None = None
    ) -> None:
        """`quotas` None: the keys have no limits."""
        self._app = app
        self._limits = limits
        self._keys = keys
        self._quotas = quotas
        self._log = RefusalLog()
        self._num_bytes = 0
        """Of all bodies that are incomplete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        async with AsyncExitStack() as stack:
            try:
                check_head(scope)
                if not _is_open(scope):  # else it has no use for a body
                    key = self._key_of(scope)
                    note_permit(scope, permit := Permit(key=key, name=secrets.token_hex(8)))
                    if _path_of(scope).startswith(OPERATORS) and not key.operator:
                        raise NotAnOperator(path=scope["path"])
                    standing = await self._standing(scope, permit, stack)
                    if standing is not None:
                        send = _with_headers(send, rate_limit_headers(standing, key))
                        check_standing(standing, key)
                    receive = await self._with_body_read(scope, body)
            except EesdError as error:
                if not isinstance(error, TooSlow):
                    await body.discard()
                leave_out_of_log(scope)
                await refusal(error, scope, log=self._log)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _key_of(self, scope: Scope) -> ApiKey:
        if self._keys is None:
            return ANYONE
        scheme, _, given = (_header(scope, b"authorization") or b"").partition(b" ")
        if scheme != b"Bearer":
            raise UnknownKey
        key = self._keys.find(given)
        if key is None:
            raise UnknownKey if self._keys.is_complete else KeysUnknown
        return key

    async def _standing(
        self, scope: Scope, permit: Permit, stack: AsyncExitStack
    ) -> Standing | None:
        """Returns how a key with limits stands after it has asked for this work; `stack` returns
        the permit that it got."""
        if self._quotas is None or not permit.key.has_limits or scope["method"] != "POST":
            return None
        standing = await self._quotas.acquire(permit.key, permit.name)
        if standing.refused is None:
            stack.callback(self._quotas.release, permit)
        return standing

    async def _with_body_read(self, scope: Scope, receive: Receive) -> Receive:
        """Returns a `receive` that begins with the whole body. Raises an EesdError."""
        length = _header(scope, b"content-length")
        if length is None and _header(scope, b"transfer-encoding") is None:
            return receive
        if length is not None and length.isdigit() and int(length[:20]) > self._max_bytes:
            raise BodyTooLarge(limit=self._max_bytes)
        try:
            async with asyncio.timeout(self._limits.read_timeout_s):
                messages = await self._read(receive)
        except TimeoutError as error:
            raise TooSlow(part="body", limit_s=self._limits.read_timeout_s) from error
        return _replayed(messages, receive)

    async def _read(self, receive: Receive) -> list[Message]:
        """Returns the whole body as one message, or the message that the client has left."""
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return [message]
                part = message.get("body", b"")
                self._num_bytes += len(part)
                body += part
                self._check_sizes(body)
                if not message.get("more_body", False):
                    check_json(body, max_depth=self._limits.max_json_depth)
                    return [{"type": "http.request", "body": bytes(body), "more_body": False}]
        finally:
            self._num_bytes -= len(body)

    def _check_sizes(self, body: bytearray) -> None:
        if len(body) > self._max_bytes:
            raise BodyTooLarge(limit=self._max_bytes)
        too_much = self._num_bytes > _MAX_BODIES_IN_MEMORY * self._max_bytes
        if too_much and len(body) > _SMALL_BODY_BYTES:
            raise CapacityError("too many bodies are being sent at the same time: try again")

    @property
    def _max_bytes(self) -> int:
        return self._limits.max_body_bytes


def check_head(scope: Scope) -> None:
    """Raises RequestError unless headers and path are text that may be written to a log."""
    parts = list(chain.from_iterable(scope["headers"]))
    if sum(map(len, parts)) > MAX_HEAD_BYTES:
        raise HeadTooLarge(limit=MAX_HEAD_BYTES)
    try:
        text = "".join(part.decode() for part in parts)
    except UnicodeDecodeError as error:
        raise RequestError("found a header that is not UTF-8: send headers in ASCII") from error
    if _CONTROL.search(text) or _CONTROL.search(scope["path"]):
        raise RequestError(
            "found control characters in a header or in the path: send printable characters"
        )
    if not scope["path"].startswith("/"):
        raise RequestError("found a target that is no path: send one that begins with /")
    request_id = _header(scope, b"x-request-id")
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            "x-request-id: expected 1 to 128 printable ASCII characters without blanks",
            param="x-request-id",
        )


def refusal(error: Exception, scope: Scope, *, log: RefusalLog) -> Response:
    """Returns the answer to a request that is refused before it is parsed."""
    answer = http_error_of(error)
    note_refusal(scope, answer)
    log.note(
        client=(scope.get("client") or ("unknown",))[0],
        status=answer.status,
        path=ascii(scope["path"])[:_LOGGED_CHARS],
        reason=answer.message[:_LOGGED_CHARS],
    )
    return Response(
        encoded(answer.body),
        status_code=answer.status,
        headers={**answer.headers, "Connection": "close"},
        media_type="application/json",
    )


class _Body:
    """A `receive` that knows whether the body is complete."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_complete = False

    async def __call__(self) -> Message:
        message = await self._receive()
        is_part = message["type"] == "http.request" and message.get("more_body", False)
        self._is_complete = not is_part
        return message

    async def discard(self) -> None:
        """Reads what is under way, within bounds: a connection that is closed with unread data is
        reset, and the client would not see the answer."""
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while not self._is_complete and num_bytes < _DISCARD_BYTES:
                    num_bytes += len((await self()).get("body", b""))


def _is_open(scope: Scope) -> bool:
    return _path_of(scope) in OPEN_PATHS


def _path_of(scope: Scope) -> str:
    """Returns the path as routes see it."""
    return get_route_path(scope)


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    more = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return with_headers


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _replayed(messages: Iterable[Message], rest: Receive) -> Receive:
    left = iter(messages)

    async def receive() -> Message:
        message = next(left, None)
        return await rest() if message is None else message

    return receive
