"""The id of a request: in its answer, in all log lines about it, and in its span.

It is that of the header X-Request-Id, or drawn. A body may name another one.
"""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from http import HTTPStatus

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd_dist.telemetry.logs import current_request
from serve_app.openai.context import NONCE_BYTES, REQUEST_ID_HEADER
from serve_app.openai.middleware.departures import CLIENT_CLOSED_REQUEST, has_left
from serve_app.openai.middleware.http_metrics import path_format_of
from serve_app.openai.middleware.permits import noted_permit
from serve_app.openai.schema import REQUEST_ID_PATTERN

logger = logging.getLogger(__name__)

_ID = "eesd.request_id"
_NONCE = "eesd.nonce"
_IS_LEFT_OUT = "eesd.left_out_of_log"
"""Keys of a request's scope."""
_VALID = re.compile(REQUEST_ID_PATTERN.encode())
_QUIET = frozenset({"/health", "/metrics", "/ping", "/ready", "/version", "/debug/state"})
"""Paths that probes, scrapers and consoles ask for every few seconds."""


class NamedRequests:
    """ASGI middleware around the whole API: names each request, and logs its end in one line,
    unless it was refused at the gate."""

    def __init__(
        self, app: ASGIApp, *, routes: Sequence[BaseRoute], names_answers: bool = True
    ) -> None:
        """`routes`: of the API, which may become more. `names_answers`: whether to put the id into
        answers; Ray's HTTP proxy does so, and draws ids for requests without one."""
        self._app = app
        self._routes = routes
        self._names_answers = names_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_NONCE] = nonce = secrets.token_bytes(NONCE_BYTES)
        name = _header_id(scope) or nonce.hex()
        note_request_id(scope, name)
        began_s = time.monotonic()
        status = 0
        """0: no answer was sent."""

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._names_answers:
                    header = (REQUEST_ID_HEADER.encode(), name.encode())
                    message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:  # of what lies between this and `UnexpectedErrors`
            status = status or HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            self._log(scope, status=status, seconds=time.monotonic() - began_s)

    def _log(self, scope: Scope, *, status: int, seconds: float) -> None:
        if _IS_LEFT_OUT in scope:
            return
        path = path_format_of(scope, self._routes)
        status = CLIENT_CLOSED_REQUEST if has_left(scope) else status
        if path in _QUIET and status < HTTPStatus.BAD_REQUEST:
            return
        permit = noted_permit(scope)
        logger.info(
            "answered: request=%s key=%s method=%s path=%s status=%d seconds=%.3f "
            "prompt_tokens=%d tokens=%d",
            *(request_id_of(scope), "none" if permit is None else permit.key.name),
            *(ascii(scope["method"])[1:-1][:16], path, status, seconds),
            0 if permit is None else permit.num_prompt_tokens,
            0 if permit is None else permit.num_generated_tokens,
        )


def note_request_id(scope: Scope, request_id: str) -> None:
    """Names the request, for what is logged and answered from now on."""
    scope[_ID] = request_id
    current_request.set(request_id)


def leave_out_of_log(scope: Scope) -> None:
    """Writes no line about the end of this request: another log counts it."""
    scope[_IS_LEFT_OUT] = True


def request_id_of(scope: Scope) -> str:
    request_id: str = scope.get(_ID, "")
    return request_id


def nonce_of(scope: Scope) -> bytes:
    """Returns the random bytes that were drawn for a request: its id, if it has no other."""
    nonce: bytes = scope[_NONCE]
    return nonce


def _header_id(scope: Scope) -> str:
    """Returns the header's id; empty without a valid one (the gate refuses others)."""
    name = REQUEST_ID_HEADER.encode()
    raw_id = next((value for key, value in scope["headers"] if key == name), b"")
    return raw_id.decode("ascii") if _VALID.fullmatch(raw_id) else ""
