"""The span of an HTTP request, by OpenTelemetry's conventions for servers.

Refusals before parsing have one too. Health checks, scrapes and operators' pages have none: they
would hide the requests.
"""

from collections.abc import Sequence
from http import HTTPStatus

from opentelemetry.trace import Span, Status, StatusCode, Tracer
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import Attributes, context_of, server_span, traceparent_of
from serve_app.openai.middleware.departures import CLIENT_CLOSED_REQUEST, has_left
from serve_app.openai.middleware.gate import OPEN_PATHS, OPERATORS
from serve_app.openai.middleware.http_metrics import OTHER_PATH, path_format_of, reason_of
from serve_app.openai.middleware.request_ids import request_id_of

_TRACEPARENT = "eesd.traceparent"
"""Key of a request's scope: the traceparent for spans inside this one."""
_METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"}
)
_MAX_TRACEPARENT_CHARS = 64
_MAX_CHARS = 256
"""Characters of an attribute with a text of the client's, at most."""


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
        status: int | None = None
        """None before the answer has begun."""

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # of what lies between this and `UnexpectedErrors`
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            raise
        finally:
            span.set_attribute(names.REQUEST_ID, request_id_of(scope))
            _describe(span, status=status, scope=scope)
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
    traceparents = (value for name, value in scope["headers"] if name == b"traceparent")
    return next((value.decode("latin-1")[:_MAX_TRACEPARENT_CHARS] for value in traceparents), None)


def _describe(span: Span, *, status: int | None, scope: Scope) -> None:
    """A client that leaves is no error, and neither is a request that is refused."""
    if has_left(scope):
        span.set_attribute(names.CLIENT_LEFT, True)
        status = CLIENT_CLOSED_REQUEST
    if status is None:
        return
    span.set_attribute(names.HTTP_STATUS, int(status))
    reason = reason_of(scope)
    if status == CLIENT_CLOSED_REQUEST:
        return
    if status >= HTTPStatus.BAD_REQUEST and reason is not None:
        span.set_attribute(names.ERROR_TYPE, reason)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(Status(StatusCode.ERROR))


def _is_operators(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or path.startswith(OPERATORS)
