"""Sets up the OpenTelemetry SDK: sampler, exporter, kept traces. Imported only where tracing is on.

What has no option here the SDK reads from its own environment variables (headers, certificates,
queue sizes, resource attributes).
"""

import json
import os
import threading
import time
from base64 import b64decode
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context, get_value
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

from eesd_dist.errors import ConfigError
from eesd_dist.loopback import bypass_proxies
from eesd_dist.telemetry.round_spans import PROMISED_SPAN_ID, random_id
from eesd_dist.telemetry.span_records import SpanRecord
from eesd_dist.telemetry.tracing_options import TracingOptions

_EXPORT_TIMEOUT_S = 5.0
_SCHEDULE_DELAY_MS = 500.0
"""A process that is killed loses at most the spans of this time."""
_MAX_WAITING = 8192
_IDS = {"traceId", "spanId", "parentSpanId"}
_MAX_SPANS_OF_TRACE = 512
"""Number of spans of a trace that one process keeps at most."""


def make_provider(options: TracingOptions, *, process: str) -> "tuple[TracerProvider, KeptTraces]":
    """Returns a new provider, and the traces that it keeps; does not change the global one. Raises
    ConfigError for a variable that the SDK cannot read, which it names."""
    try:
        provider = TracerProvider(
            sampler=_sampler(options),
            resource=Resource.create({"service.name": "eesd", "service.instance.id": process}),
            id_generator=_Ids(),
        )
    except ValueError as error:
        raise ConfigError(f"tracing: {error}: mend or unset it in the environment") from error
    traces = KeptTraces(process, max_traces=options.max_traces_kept)
    if options.max_traces_kept:
        provider.add_span_processor(traces)
    if options.exports:
        provider.add_span_processor(
            BatchSpanProcessor(
                _exporter(options, process),
                max_queue_size=_MAX_WAITING,
                schedule_delay_millis=_SCHEDULE_DELAY_MS,
            )
        )
    return provider, traces


def _exporter(options: TracingOptions, process: str) -> SpanExporter:
    if options.endpoint is None:
        assert options.folder is not None, "one of the two exports"
        return OtlpJsonFile(Path(options.folder) / f"{process}.jsonl")
    bypass_proxies()
    if options.protocol == "grpc":
        # grpc takes a second to import.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcSpanExporter,
        )

        return GrpcSpanExporter(endpoint=options.endpoint, timeout=_EXPORT_TIMEOUT_S)
    base = options.endpoint.rstrip("/").removesuffix("/v1/traces")
    return OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=_EXPORT_TIMEOUT_S)


def _sampler(options: TracingOptions) -> Sampler | None:
    """Returns None for the SDK's sampler, which it makes of its environment variables, and for
    traces that are only kept one that bounds their cost."""
    variables = {OTEL_TRACES_SAMPLER: options.sampler, OTEL_TRACES_SAMPLER_ARG: options.sampler_arg}
    os.environ.update({key: value for key, value in variables.items() if value is not None})
    if options.exports or OTEL_TRACES_SAMPLER in os.environ:
        return None
    few = FewRequests()
    # Requests of a client that traces everything are as many.
    return ParentBased(few, remote_parent_sampled=few)


class FewRequests(Sampler):
    """Samples every HTTP request of a service with little load, and one in a second of a busy one;
    whatever else has a sampled parent."""

    def __init__(
        self,
        *,
        per_s: float = 1.0,
        burst: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left = float(burst)
        self._filled_s = clock()
        self._lock = threading.Lock()

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if kind is SpanKind.SERVER and not self._takes_one():
            return SamplingResult(Decision.DROP)
        state = get_current_span(parent_context).get_span_context().trace_state
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, state)

    def _takes_one(self) -> bool:
        with self._lock:
            time_s = self._clock()
            more = self._per_s * (time_s - self._filled_s)
            self._left = min(self._left + more, float(self._burst))
            self._filled_s = time_s
            is_left = self._left >= 1.0
            self._left -= is_left
            return is_left

    def get_description(self) -> str:
        return f"FewRequests({self._per_s:g},{self._burst})"


class KeptTraces(SpanProcessor):
    """The spans of the latest traces of this process. Read from any thread."""

    def __init__(self, process: str, *, max_traces: int) -> None:
        self._process = process
        self._max_traces = max_traces
        self._traces: OrderedDict[str, deque[SpanRecord]] = OrderedDict()
        self._lock = threading.Lock()

    def on_end(self, span: ReadableSpan) -> None:
        record = self._record_of(span)
        with self._lock:
            # The last spans to end are those of the whole request: the first ones go. A client may
            # send any number of requests of one trace.
            newest: deque[SpanRecord] = deque(maxlen=_MAX_SPANS_OF_TRACE)
            self._traces.setdefault(record.trace_id, newest).append(record)
            self._traces.move_to_end(record.trace_id)
            if len(self._traces) > self._max_traces:
                self._traces.popitem(last=False)

    def read(self, trace_ids: Collection[str] | None = None) -> tuple[SpanRecord, ...]:
        with self._lock:
            chosen = self._traces if trace_ids is None else set(trace_ids) & self._traces.keys()
            return tuple(span for trace_id in chosen for span in self._traces[trace_id])

    def _record_of(self, span: ReadableSpan) -> SpanRecord:
        context = span.get_span_context()
        assert context is not None, "a span of the SDK has one"
        return SpanRecord(
            name=span.name,
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
            start_unix_ns=span.start_time or 0,
            end_unix_ns=span.end_time or 0,
            process=self._process,
            attributes=dict(span.attributes or {}),
        )


class OtlpJsonFile(SpanExporter):
    """Appends one export request per line, in the file format of OpenTelemetry's collector."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("a")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._stream.write(_otlp_json(spans) + "\n")
        self._stream.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._stream.close()


def _otlp_json(spans: Sequence[ReadableSpan]) -> str:
    """Returns Protobuf's JSON with ids in hex, as OTLP/JSON requires, instead of base64."""
    request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for item in (span, *span.get("links", ())):
                    item.update({key: b64decode(item[key]).hex() for key in _IDS & item.keys()})
    return json.dumps(request, separators=(",", ":"))


class _Ids(IdGenerator):
    """Generates random ids, except for a round's span: that gets the id in the round's header."""

    def __init__(self) -> None:
        self._random = Random()

    def generate_span_id(self) -> int:
        promised = get_value(PROMISED_SPAN_ID)
        return promised if isinstance(promised, int) and promised else random_id(self._random, 64)

    def generate_trace_id(self) -> int:
        return random_id(self._random, 128)
