"""Receivers of OTLP over HTTP and over gRPC, in place of a collector."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.support.spans import WrittenSpan


class Receiver:
    """The spans that have arrived."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._lock = threading.Lock()
        self._spans: list[WrittenSpan] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            self._spans += [
                _span(
                    span, process=str(_attributes(resource_spans.resource)["service.instance.id"])
                )
                for resource_spans in request.resource_spans
                for scope in resource_spans.scope_spans
                for span in scope.spans
            ]

    @property
    def spans(self) -> list[WrittenSpan]:
        """In the order of their start."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.start_us)


@contextmanager
def receiving(protocol: str) -> Iterator[Receiver]:
    """Runs a receiver of `http/protobuf` or `grpc` on a free port within the block."""
    with _over_grpc() if protocol == "grpc" else _over_http() as receiver:
        yield receiver


@contextmanager
def _over_http() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_ours = self.path == "/v1/traces"
            if is_ours:
                receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_ours else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _over_grpc() -> Iterator[Receiver]:
    receiver = Receiver()

    class Servicer(TraceServiceServicer):  # type: ignore[misc]
        def Export(  # noqa: N802  # gRPC's name
            self, request: ExportTraceServiceRequest, context: object
        ) -> ExportTraceServiceResponse:
            receiver.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(grace=None).wait()


def _span(span: Any, *, process: str) -> WrittenSpan:
    return WrittenSpan(
        process=process,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        start_us=span.start_time_unix_nano / 1000,
        end_us=span.end_time_unix_nano / 1000,
        attributes=_attributes(span),
        status={"code": span.status.code} if span.status.code else {},
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _attributes(item: Any) -> dict[str, object]:
    return {entry.key: _value(entry.value) for entry in item.attributes}


def _value(value: Any) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    content: object = getattr(value, kind)
    return content
