"""The size of bodies, as Ray's HTTP proxy knows it.

Serve's proxy reads a body as fast as it comes and passes all of it on, whatever the ingress makes
of it. The limit belongs to the application, changes while it runs, and another application behind
the same proxy has another one: so each ingress states it in its answers, and the proxy holds
requests to it before they cost more than a head.
"""

from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

from serve_app.openai.errors import BodyTooLarge

LIMIT_HEADER = b"x-eesd-max-body-bytes"
"""Header from an ingress to its proxy; no client sees it."""
_PATHS_WITH_BODIES = ("/v1/", "/tokenize", "/detokenize")
_DIGITS = 20


def stated(send: Send, limit: Callable[[], int]) -> Send:
    """Returns a `send` that states the limit in the answer."""

    async def with_limit(message: Message) -> None:
        if message["type"] == "http.response.start":
            header = (LIMIT_HEADER, b"%d" % limit())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return with_limit


def declared_bytes(scope: Scope) -> int | None:
    """Returns the Content-Length; None for a request without one that is a number."""
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(value[:_DIGITS]) if value.isdigit() else None


class BodyLimits:
    """The limits of the applications behind one proxy, by the path under which each is served."""

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}

    def check(self, scope: Scope) -> None:
        """Raises BodyTooLarge for a length that the application would refuse."""
        limit, length = self._limit_of(scope), declared_bytes(scope)
        if limit is not None and length is not None and length > limit:
            raise BodyTooLarge(limit=limit)

    def bounded(self, receive: Receive, scope: Scope) -> Receive:
        """Returns a `receive` that drops what follows a body of more than the limit. The
        application has had too much by then, and answers."""
        limit = self._limit_of(scope)
        if limit is None:
            return receive
        num_bytes = 0

        async def within_limit() -> Message:
            nonlocal num_bytes
            is_over = num_bytes > limit
            message = await receive()
            while is_over and message["type"] == "http.request":
                message = await receive()
            num_bytes += len(message.get("body", b""))
            return message

        return within_limit

    def learning(self, send: Send, scope: Scope) -> Send:
        """Returns a `send` that takes the limit out of the answer. Serve has set the path of the
        application in `scope` by then."""

        async def without_limit(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                others = [header for header in headers if bytes(header[0]).lower() != LIMIT_HEADER]
                for name, value in headers:
                    if bytes(name).lower() == LIMIT_HEADER:
                        self._limits[scope.get("root_path", "")] = int(value)
                message = {**message, "headers": others}
            await send(message)

        return without_limit

    def _limit_of(self, scope: Scope) -> int | None:
        path: str = scope["path"]
        roots = [
            root
            for root in self._limits
            if path.startswith(root) and path[len(root) :].startswith(_PATHS_WITH_BODIES)
        ]
        return self._limits[max(roots, key=len)] if roots else None
