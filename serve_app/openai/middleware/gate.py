"""The admission gate: what a request must pass before anything parses it.

Headers are checked first, then the API key and its limits, then the body: its size, the time it
takes to arrive, and the nesting of its JSON. A refusal waits for no byte of the body, is logged by
`RefusalLog`, and closes the connection, since the rest of the body may still be under way.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

from starlette._utils import get_route_path
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd_dist.errors import CapacityError, EesdError
from eesd_dist.parameters import check_json
from eesd_dist.routing.quotas import Standing
from serve_app.openai.api_settings import Limits
from serve_app.openai.console.pages import PATHS as PAGES
from serve_app.openai.errors import (
    BodyTooLarge,
    KeysUnknown,
    NotAnOperator,
    TooSlow,
    UnknownKey,
)
from serve_app.openai.keys import ANYONE, ApiKey, KeyRing, Permit
from serve_app.openai.middleware.body_limits import declared_bytes, stated
from serve_app.openai.middleware.head_gate import check_head, header_of, refusal
from serve_app.openai.middleware.permits import (
    Quotas,
    check_standing,
    note_permit,
    rate_limit_headers,
)
from serve_app.openai.middleware.refusal_log import RefusalLog
from serve_app.openai.middleware.request_ids import leave_out_of_log

_MAX_BODIES_IN_MEMORY = 64
"""Bodies of full size that may be incomplete at the same time."""
_SMALL_BODY_BYTES = 64 * 2**10
"""Smaller bodies are read however many large ones are held back."""
_OF_BODIES = frozenset({b"content-length", b"transfer-encoding"})
OPEN_PATHS = frozenset({"/health", "/metrics", "/ping", "/ready", "/version"}) | PAGES
"""Paths for probes, scrapers and browsers that open a page, which send no key."""
OPERATORS = "/debug/"
"""Paths that need an operator's key."""


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
        """Bytes of all bodies that are incomplete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = stated(send, lambda: self._max_bytes)
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
                    receive = await self._with_body_read(scope, receive)
            except EesdError as error:
                leave_out_of_log(scope)
                await refusal(error, scope, log=self._log)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _key_of(self, scope: Scope) -> ApiKey:
        if self._keys is None:
            return ANYONE
        scheme, _, token = (header_of(scope, b"authorization") or b"").partition(b" ")
        if scheme != b"Bearer":
            raise UnknownKey
        key = self._keys.find(token)
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
        if standing.refusal is None:
            stack.callback(self._quotas.release, permit)
        return standing

    async def _with_body_read(self, scope: Scope, receive: Receive) -> Receive:
        """Returns a `receive` that begins with the whole body. Raises an EesdError."""
        if not any(name in _OF_BODIES for name, _ in scope["headers"]):
            return receive
        length = declared_bytes(scope)
        if length is not None and length > self._max_bytes:
            raise BodyTooLarge(limit=self._max_bytes)
        try:
            async with asyncio.timeout(self._limits.read_timeout_s):
                messages = await self._read(receive)
        except TimeoutError as error:
            raise TooSlow(section="body", limit_s=self._limits.read_timeout_s) from error
        return _replayed(messages, receive)

    async def _read(self, receive: Receive) -> list[Message]:
        """Returns the whole body as one message. Raises ClientDisconnect."""
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                self._num_bytes += len(chunk)
                body += chunk
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


def _replayed(messages: Iterable[Message], upstream: Receive) -> Receive:
    left = iter(messages)

    async def receive() -> Message:
        message = next(left, None)
        return await upstream() if message is None else message

    return receive
