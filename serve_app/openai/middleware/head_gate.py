"""The first gate: what the head of a request must be before anything acts on it.

It runs in Ray's HTTP proxy too, before Serve, which acts on headers of its own, keeps some of their
values for ever, and answers what is not UTF-8 with 500. Only the headers that this project reads
go on.
"""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from eesd_dist.errors import RequestError
from serve_app.openai.context import HEADERS
from serve_app.openai.errors import EncodedBody, HeadTooLarge, http_error_of
from serve_app.openai.middleware.body_limits import BodyLimits
from serve_app.openai.middleware.http_metrics import note_refusal
from serve_app.openai.middleware.refusal_log import RefusalLog
from serve_app.openai.schema import REQUEST_ID_PATTERN
from serve_app.openai.sse import encoded

MAX_HEAD_BYTES = 64 * 2**10
FORWARDED_HEADERS = frozenset(
    {
        b"access-control-request-headers",
        b"access-control-request-method",
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"if-none-match",
        b"origin",
        b"tracestate",
        b"transfer-encoding",
        b"user-agent",
    }
) | {name.lower().encode() for name in HEADERS}
"""All that is read behind the gate. Of a header that is sent more than once the first counts."""
_LOGGED_CHARS = 120
_VERSIONS = frozenset({"1.0", "1.1"})
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN.encode())


class HeadGate:
    """ASGI middleware that refuses WebSockets and heads that are ambiguous or no plain text, and
    drops headers that nothing reads."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._limits = BodyLimits()
        self._log = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_framing(scope)
            check_head(scope)
            scope = {**scope, "headers": forwarded(scope["headers"])}
            self._limits.check(scope)
        except RequestError as error:
            await refusal(error, scope, log=self._log)(scope, receive, send)
            return
        await self._app(
            scope, self._limits.bounded(receive, scope), self._limits.learning(send, scope)
        )


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers that are read behind the gate, each once."""
    by_name: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in FORWARDED_HEADERS:
            by_name.setdefault(name, value)
    return list(by_name.items())


def check_framing(scope: Scope) -> None:
    """Raises RequestError for a head of which two readers could make different requests."""
    names = Counter(name for name, _ in scope["headers"])
    version = scope["http_version"]
    if version not in _VERSIONS:
        raise RequestError(f"found HTTP/{version}, expected HTTP/1.1")
    if names[b"host"] != 1 and (version == "1.1" or names[b"host"]):
        raise RequestError(f"found {names[b'host']} Host headers, expected one")
    host = header_of(scope, b"host")
    if host is not None and not _HOST.fullmatch(host):
        raise RequestError("found a Host header that is no host, expected a name and a port")
    coding = header_of(scope, b"transfer-encoding")
    if coding is not None and (coding.lower() != b"chunked" or version != "1.1"):
        raise RequestError(
            "found a Transfer-Encoding that is not served, expected chunked in HTTP/1.1, or "
            "Content-Length"
        )


def check_head(scope: Scope) -> None:
    """Raises RequestError unless headers and path are text that may be written to a log, and the
    body is what it seems."""
    strings = list(chain.from_iterable(scope["headers"]))
    if sum(map(len, strings)) > MAX_HEAD_BYTES:
        raise HeadTooLarge(limit=MAX_HEAD_BYTES)
    try:
        text = "".join(string.decode() for string in strings)
    except UnicodeDecodeError as error:
        raise RequestError("found a header that is not UTF-8: send headers in ASCII") from error
    if _CONTROL.search(text) or _CONTROL.search(scope["path"]):
        raise RequestError(
            "found control characters in a header or in the path: send printable characters"
        )
    if not scope["path"].startswith("/"):
        raise RequestError("found a target that is no path: send one that begins with /")
    encoding = header_of(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise EncodedBody(encoding=encoding.decode())
    request_id = header_of(scope, b"x-request-id")
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            "x-request-id: expected 1 to 128 printable ASCII characters without blanks",
            param="x-request-id",
        )


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """Returns the first header of this name in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


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
