"""What runs inside Ray's HTTP proxy, before Serve reads a request.

Serve reads headers as UTF-8 and answers others with 500, and its server waits without a limit for
the rest of a request's head. It never answers some requests for a WebSocket, and loses the body of
a request that offers HTTP/2, as Java's client does. Serve calls `proxy_middlewares` where
`cluster.ray_compat.PROXY_CALLBACK` names it; then it imports the protocol class from uvicorn.
"""

import asyncio
import sys

import httptools
import uvicorn.protocols.http.auto
from starlette.middleware import Middleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from eesd_dist.errors import RequestError
from serve_app.openai.errors import HeadTooLarge, TooSlow, http_error_of
from serve_app.openai.middleware.gate import MAX_HEAD_BYTES, HeadGate
from serve_app.openai.sse import encoded

HEAD_TIMEOUT_S = 20.0
"""Longest the head of a request may take, and a connection may stay open before its first one."""

_PART_BYTES = 8192
_UPGRADE = b"upgrade"


def proxy_middlewares() -> list[Middleware]:
    uvicorn.protocols.http.auto.AutoHTTPProtocol = BoundedHead
    return [Middleware(HeadGate)]


class BoundedHead(HttpToolsProtocol):
    """Bounds the time and size of the heads (request line and headers) of one connection, on which
    no other protocol is spoken."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_head_bytes = 0
        """Since the last complete head or part of a body."""
        self._has_advanced = False
        """Whether the last data had the end of a head, or a part of a body."""
        self._deadline: asyncio.TimerHandle | None = None
        self._part = b""
        """What is being parsed."""
        self._again: bytes | None = None
        """What is to be parsed next, in place of the rest of it."""
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # One read may hold the end of a request and a large part of the next head, of which the
        # parser does not say where it begins: in parts, at most one part of it is not counted.
        for begin in range(0, len(data), _PART_BYTES):
            if self.transport.is_closing():
                return  # refused
            self._received(data[begin : begin + _PART_BYTES])

    def _received(self, data: bytes) -> None:
        self._has_advanced = False
        part: bytes | None = data
        while part is not None:
            self._part, self._again = part, None
            super().data_received(part)
            part = self._again
        if self._has_advanced:
            return
        # A part of a head, also of one that waits its turn, or of what follows a chunked body.
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(limit=MAX_HEAD_BYTES))
        elif self._deadline is None and not self._is_answering:
            self._await_head()

    def on_body(self, body: bytes) -> None:
        self._has_advanced, self._num_head_bytes = True, 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._has_advanced = True
        self._stop_waiting()
        super().on_headers_complete()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, in the same shape as all errors."""
        self._end(RequestError(msg))

    def _should_upgrade(self) -> bool:
        """Asked only where the parser stops at the end of a head, for any reason."""
        return True

    def handle_websocket_upgrade(self) -> None:
        """Called where the parser has stopped at the end of a head that offers another protocol. A
        server may go on as if it had not: the head is parsed again without the offer."""
        if self.parser.get_method() == b"CONNECT":
            self._end(RequestError("found CONNECT: this is no proxy"))
            return
        if any(b"websocket" in value.lower() for name, value in self.headers if name == _UPGRADE):
            self._end(RequestError("WebSockets are not served: send HTTP"))
            return
        stopped = sys.exception()
        assert isinstance(stopped, httptools.HttpParserUpgrade), "uvicorn calls this handling it"
        (end,) = stopped.args
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != _UPGRADE]
        self._again = b"\r\n".join([*lines, b"", b""]) + self._part[end:]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(
            HEAD_TIMEOUT_S, self._refuse, TooSlow(part="head", limit_s=HEAD_TIMEOUT_S)
        )

    def _stop_waiting(self) -> None:
        self._num_head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: Exception) -> None:
        if self._num_head_bytes:
            self._end(error)
        else:
            self.transport.close()

    def _end(self, error: Exception) -> None:
        """Closes the connection, and says why where no other answer is under way."""
        if not self.transport.is_closing() and not self._is_answering:
            self.transport.write(_answer(error))
        self.transport.close()


def _answer(error: Exception) -> bytes:
    answer = http_error_of(error)
    body = encoded(answer.body)
    head = (
        f"HTTP/1.1 {answer.status} \r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
