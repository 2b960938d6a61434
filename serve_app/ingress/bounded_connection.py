"""The HTTP connections of Ray's proxy, bounded in time and size in every state.

uvicorn waits without a limit for the rest of a head or a body and for a reader that has stopped,
and gives no answer to a body that is malformed. Its pipelining stays as it is: requests of one
connection are answered in order, and a refusal waits for the answers before it.
"""

import asyncio
import sys
from collections import deque

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from eesd_dist.errors import RequestError
from serve_app.ingress.gentle_transport import GentleTransport, Timer
from serve_app.openai.errors import HeadTooLarge, TooSlow, http_error_of
from serve_app.openai.middleware.head_gate import MAX_HEAD_BYTES
from serve_app.openai.sse import encoded

HEAD_TIMEOUT_S = 20.0
"""Longest the head of a request may take, and a connection may stay open before its first one."""
BODY_PAUSE_S = 30.0
"""Longest pause of a body. An ingress bounds the whole time of those that it reads."""

_PART_BYTES = 8192
_UPGRADE = b"upgrade"


class BoundedConnection(HttpToolsProtocol):
    """A connection on which no other protocol is spoken."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gentle = GentleTransport(
            transport, loop=self.loop, is_more_expected=lambda: self._is_cut or self._is_in_body
        )
        super().connection_made(self._gentle)
        self._num_head_bytes = 0
        """Bytes since the last complete head or part of a body."""
        self._has_advanced = False
        """True if the last data had the end of a head, or a part of a body."""
        self._is_in_body = False
        """True while the body of `cycle`, the last request with a complete head, is incomplete."""
        self._body_advanced_s = 0.0
        self._is_cut = False
        """True once what follows is not parsed any more."""
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered, or was last; None before the first."""
        self._refusal: Exception | None = None
        """Error to be answered when all requests before it are."""
        self._head = Timer(self.loop)
        self._body = Timer(self.loop)
        self._chunk = b""
        """Bytes that are being parsed."""
        self._remainder: bytes | None = None
        """Bytes to be parsed next, in place of the rest of `_chunk`."""
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._body.stop()
        self._gentle.lost()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._gentle.watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._gentle.forget_reader()

    def data_received(self, data: bytes) -> None:
        if self._gentle.is_closing():
            self._gentle.discard(len(data))
            return
        if self._is_cut:  # a refusal waits for its turn
            self.flow.pause_reading()
            return
        # One read may hold the end of a request and a large part of the next head, of which the
        # parser does not say where it begins: in parts, at most one part of it is not counted.
        for begin in range(0, len(data), _PART_BYTES):
            if self._is_cut or self._gentle.is_closing():
                return
            self._received(data[begin : begin + _PART_BYTES])

    def _received(self, data: bytes) -> None:
        self._has_advanced = False
        chunk: bytes | None = data
        while chunk is not None:
            self._chunk, self._remainder = chunk, None
            super().data_received(chunk)
            chunk = self._remainder
        if self._has_advanced or self._is_cut:
            return
        # A part of a head, also of one that waits its turn, or of what follows a chunked body.
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(limit=MAX_HEAD_BYTES))
        elif not self._head.is_running and not self._is_answering:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._has_advanced, self._num_head_bytes = True, 0
        self._head.stop()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # else another protocol was offered
            self._is_in_body = True
            self._await_body()

    def on_body(self, body: bytes) -> None:
        self._has_advanced, self._num_head_bytes = True, 0
        self._body_advanced_s = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._body.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._gentle.is_closing() or self._is_answering:
            return
        if self._refusal is not None:
            self._close(self._refusal)
        elif self._is_in_body:  # it was answered without its body: the rest has no reader
            self._is_cut = True
            self._gentle.close()
        elif self._num_head_bytes:
            self._await_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering, self._body_advanced_s = cycle, self.loop.time()
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, in the same shape as all errors."""
        self._refuse(RequestError("found what is no valid HTTP/1.1: send well-formed requests"))

    def _should_upgrade(self) -> bool:
        """Asked only where the parser stops at the end of a head, for any reason."""
        return True

    def handle_websocket_upgrade(self) -> None:
        """Called where the parser has stopped at the end of a head that offers another protocol. A
        server may go on as if it had not: the head is parsed again without the offer."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(RequestError("found CONNECT: this is no proxy"))
            return
        if any(b"websocket" in value.lower() for name, value in self.headers if name == _UPGRADE):
            self._refuse(RequestError("WebSockets are not served: send HTTP"))
            return
        stopped = sys.exception()
        assert isinstance(stopped, httptools.HttpParserUpgrade), "uvicorn calls this handling it"
        (end,) = stopped.args
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != _UPGRADE]
        self._remainder = b"\r\n".join([*lines, b"", b""]) + self._chunk[end:]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _await_head(self) -> None:
        self._head.start(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._num_head_bytes:
            self._refuse(TooSlow(section="head", limit_s=HEAD_TIMEOUT_S))
        else:
            self._gentle.close()

    def _await_body(self) -> None:
        self._body_advanced_s = self.loop.time()
        self._body.start(BODY_PAUSE_S, self._check_body)

    def _check_body(self) -> None:
        pause_s = self.loop.time() - self._body_advanced_s
        if self.flow.read_paused:  # this side does not read
            self._await_body()
        elif pause_s < BODY_PAUSE_S:
            self._body.start(BODY_PAUSE_S - pause_s, self._check_body)
        else:
            self._refuse(TooSlow(section="body", limit_s=BODY_PAUSE_S))

    def _refuse(self, error: Exception) -> None:
        """Answers with an error, once all requests before it are answered, and closes."""
        if self._is_cut or self._gentle.is_closing():
            return
        self._is_cut = True
        self._head.stop()
        self._body.stop()
        if self._is_in_body:  # the error is in the body of `cycle`
            self._withdraw(self.cycle)
        if self._gentle.is_closing():
            return
        if self._is_answering:
            self._refusal = error
            self.flow.pause_reading()
        else:
            self._close(error)

    def _withdraw(self, cycle: RequestResponseCycle) -> None:
        """Ends a request with a wrong body: its application learns that it has no client."""
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle is not self._answering:  # but waits for its turn
            self.pipeline = deque(entry for entry in self.pipeline if entry[0] is not cycle)
        elif cycle.response_started:
            self._gentle.close()
        else:
            self._answering = None

    def _close(self, error: Exception) -> None:
        self._gentle.write(_answer(error))
        self._gentle.close()


def _answer(error: Exception) -> bytes:
    answer = http_error_of(error)
    body = encoded(answer.body)
    head = (
        f"HTTP/1.1 {answer.status} \r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
