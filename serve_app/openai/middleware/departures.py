"""Clients that leave before the end of their answer, known in one place.

Serve tells it in four ways: a disconnect is received, or an error in its place; a call to another
process ends with such an error, since Ray cancels the calls of a request with it; or the request's
own task is cancelled. Each becomes a note in the request's scope: metrics, spans and the log give
such a request the status 499, whatever was sent of its answer, and none takes it for an error.
"""

import asyncio

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLIENT_CLOSED_REQUEST = 499
_LEFT = "eesd.left"
"""Key of a request's scope."""


class Departures:
    """ASGI middleware around everything that may wait while a client leaves."""

    def __init__(self, app: ASGIApp, *, errors: tuple[type[Exception], ...] = ()) -> None:
        """`errors`: those with which the server ends what it does for a client that has left."""
        self._app = app
        self._errors: tuple[type[Exception], ...] = (*errors, ClientDisconnect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, errors=self._errors)
        try:
            await self._app(scope, answer.receive, answer.send)
        except asyncio.CancelledError:
            answer.note_departure()
            raise
        except self._errors:
            answer.note_departure()
            if not answer.response_started:  # else a server would make an error of it
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)


class _Answer:
    """Progress of one answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, errors: tuple[type[Exception], ...]
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._errors = errors
        self.response_started = False
        self._is_complete = False

    async def receive(self) -> Message:
        try:
            message = await self._receive()
        except self._errors:
            message = {"type": "http.disconnect"}
        if message["type"] == "http.disconnect":
            self.note_departure()
        return message

    async def send(self, message: Message) -> None:
        self.response_started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    def note_departure(self) -> None:
        if not self._is_complete:
            self._scope[_LEFT] = True


def has_left(scope: Scope) -> bool:
    """Returns whether the client of a request has left before the end of its answer."""
    return _LEFT in scope
