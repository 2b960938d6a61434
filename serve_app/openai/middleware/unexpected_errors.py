"""The answer to a request that a bug ends: 500, like any other answer of the API.

Starlette would answer it outside of all middlewares, and so without the headers that they add: a
web page of another origin could not read it.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class UnexpectedErrors:
    """ASGI middleware. The error goes on: middlewares outside of this one and the server note
    it."""

    def __init__(self, app: ASGIApp, *, answer: Callable[[Request, Exception], Response]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response_started = False

        async def noted(message: Message) -> None:
            nonlocal response_started
            response_started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if not response_started:
                response = self._answer(Request(scope), error)
                await response(scope, receive, send)
            raise
