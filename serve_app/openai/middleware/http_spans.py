"""The span of an HTTP request, by OpenTelemetry's conventions for servers.

Refusals before parsing have one too. Health checks, scrapes and operators' pages have none: they
would hide the requests.
"""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from opentelemetry.trace import Span, Status, StatusCode, Tracer
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import Attributes, context_of, server_span, traceparent_of
from serve_app.openai.middleware.gate import OPEN_PATHS, OPERATORS
from serve_app.openai.middleware.http_metrics import (
    CLIENT_CLOSED_REQUEST,
    OTHER_PATH,
    path_format_of,
    reason_of,
)
from serve_app.openai.middleware.request_ids import request_id_of

_TRACEPARENT = "eesd.traceparent"
"""Key of a request's scope: the traceparent for spans inside this one."""
_METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"}
)
_MAX_TRACEPARENT_CHARS = 64
_MAX_CHARS = 256
"""Of an attribute with a text of the client's."""


class TracedRequests:
    """ASGI middleware around the whole API."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer, routes: Sequence[BaseRoute]) -> None:
        """`routes`: of the API, which may become more."""
        self._app = app
        self._tracer = tracer
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_operators(scope):
            await self._app(scope, receive, send)
            return
        span = self._begin(scope)
        scope[_TRACEPARENT] = traceparent_of(span)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        answer = _Answer(receive, send)
        try:
            await self._app(scope, answer.receive, answer.send)
        except asyncio.CancelledError:  # by Ray, for a client that has left
            answer.has_client_left = True
            raise
        except Exception as error:  # of what lies between this and `UnexpectedErrors`
            answer.status = HTTPStatus.INTERNAL_SERVER_ERROR
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            raise
        finally:
            span.set_attribute(names.REQUEST_ID, request_id_of(scope))
            answer.describe(span, reason=reason_of(scope))
            span.end()

    def _begin(self, scope: Scope) -> Span:
        headers = {
            name: value.decode("utf-8", "replace")[: _MAX_CHARS if name != b"tracestate" else 512]
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate", b"user-agent")
        }
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        route = path_format_of(scope, self._routes)
        attributes: Attributes = {
            names.HTTP_METHOD: method,
            names.URL_PATH: scope["path"][:_MAX_CHARS],
            names.URL_SCHEME: scope.get("scheme", "http"),
            names.PROTOCOL_VERSION: scope.get("http_version", "1.1"),
        }
        if scope.get("server"):
            attributes[names.SERVER_ADDRESS], attributes[names.SERVER_PORT] = scope["server"]
        if scope.get("client"):
            attributes[names.CLIENT_ADDRESS] = scope["client"][0]
        if route != OTHER_PATH:
            attributes[names.HTTP_ROUTE] = route
        if b"user-agent" in headers:
            attributes[names.USER_AGENT] = headers[b"user-agent"]
        return server_span(
            self._tracer,
            method if route == OTHER_PATH else f"{method} {route}",
            parent=context_of(headers.get(b"traceparent"), headers.get(b"tracestate")),
            attributes=attributes,
        )


def traceparent_inside(scope: Scope) -> str | None:
    """Returns the traceparent of a request for spans inside its own one; the client's where there
    is none."""
    if _TRACEPARENT in scope:
        inside: str | None = scope[_TRACEPARENT]
        return inside
    sent = (value for name, value in scope["headers"] if name == b"traceparent")
    return next((value.decode("latin-1")[:_MAX_TRACEPARENT_CHARS] for value in sent), None)


class _Answer:
    """What the client has got of its answer."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.status: int | None = None
        """None before the answer has begun."""
        self._is_complete = False
        self.has_client_left = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_complete:
            self.has_client_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    def describe(self, span: Span, *, reason: str | None) -> None:
        """A client that leaves is no error, and neither is a request that is refused."""
        if self.has_client_left:
            span.set_attribute(names.CLIENT_LEFT, True)
        if self.status is None:
            return
        if self.status != CLIENT_CLOSED_REQUEST:  # which is never sent
            span.set_attribute(names.HTTP_STATUS, int(self.status))
        if self.status >= HTTPStatus.BAD_REQUEST and reason is not None:
            span.set_attribute(names.ERROR_TYPE, reason)
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))


def _is_operators(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or path.startswith(OPERATORS)
