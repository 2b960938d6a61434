"""HEAD for every path that answers GET: the same status and headers, and no body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOTES = "eesd."
"""Keys of a request's scope that begin so are notes of the middlewares for each other."""


class HeadRequests:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A copy: the server writes no body where its own scope says HEAD.
        inside = {**scope, "method": "GET"}
        try:
            await self._app(inside, receive, send_head)
        finally:
            scope.update({key: inside[key] for key in inside if key.startswith(NOTES)})
