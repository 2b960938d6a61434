"""Tracing with the OpenTelemetry SDK. Imported only where tracing is on.

Round spans are written afterwards, from the times the engine returned, so that nothing is measured
twice and a round pays about 15 microseconds a span, after its tokens have left.
"""

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eesd_dist.telemetry import names
from eesd_dist.telemetry.otlp_file import OtlpJsonFile
from eesd_dist.telemetry.tracing import NO_IDS, Attribute, Attributes, OpenSpan, SpanIds
from eesd_dist.types import RoundStats

_EXPORT_TIMEOUT_S = 5.0
_SCHEDULE_DELAY_MS = 500.0
_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]")


class OtelTracing:
    """A TracerProvider of its own; nothing global is touched."""

    def __init__(
        self, *, process: str, service: str, endpoint: str | None, folder: Path | None
    ) -> None:
        resource = Resource({"service.name": service, "service.instance.id": process})
        self._ids = _PlannedIds()
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBased(ALWAYS_ON), id_generator=self._ids
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _exporter(process, endpoint, folder),
                max_queue_size=8192,
                schedule_delay_millis=_SCHEDULE_DELAY_MS,
                max_export_batch_size=512,
                export_timeout_millis=1000 * _EXPORT_TIMEOUT_S,
            )
        )
        self._tracer = self._provider.get_tracer("eesd")

    @property
    def is_on(self) -> bool:
        return True

    def open_span(
        self, name: str, *, traceparent: str | None = None, attributes: Attributes | None = None
    ) -> OpenSpan:
        parent = _context(traceparent) if traceparent is not None else Context()
        return OtelSpan(self._tracer.start_span(name, context=parent, attributes=attributes))

    def round_ids(self, traceparents: Sequence[str | None]) -> SpanIds:
        first = next(iter(_sampled(traceparents)), None)
        if first is None:
            return NO_IDS
        return SpanIds(trace_id=int(first.split("-")[1], 16), span_id=self._ids.draw_span_id())

    def record_round(
        self, stats: RoundStats, *, ids: SpanIds = NO_IDS, attributes: Attributes | None = None
    ) -> None:
        sampled = _sampled(stats.traceparents)
        if not sampled:
            return
        described = _round_attributes(stats) | dict(attributes or {})
        with self._ids.next_span_is(ids.span_id):
            first = self._round_span(stats, sampled[0], described, links=())
        self._stage_spans(stats, first)
        for traceparent in sampled[1:]:
            link = Link(first.get_span_context())
            self._round_span(stats, traceparent, described, links=(link,))

    def record_rank(
        self, ids: SpanIds, *, rank: int, num_rows: int, started_unix_s: float, seconds: float
    ) -> None:
        if not ids:
            return
        parent = SpanContext(
            ids.trace_id, ids.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )
        self._tracer.start_span(
            names.SPAN_VERIFY_RANK,
            context=set_span_in_context(NonRecordingSpan(parent), Context()),
            attributes={names.RANK: rank, names.NUM_ROWS: num_rows},
            start_time=_nanoseconds(started_unix_s),
        ).end(_nanoseconds(started_unix_s + seconds))

    def flush(self) -> None:
        self._provider.force_flush(int(1000 * _EXPORT_TIMEOUT_S))

    def close(self) -> None:
        self._provider.shutdown()

    def _round_span(
        self,
        stats: RoundStats,
        traceparent: str,
        attributes: dict[str, Attribute],
        *,
        links: Sequence[Link],
    ) -> Span:
        span = self._tracer.start_span(
            names.SPAN_ROUND,
            context=_context(traceparent),
            attributes=attributes,
            links=links,
            start_time=_nanoseconds(stats.started_unix_s),
        )
        span.end(_nanoseconds(stats.started_unix_s + stats.total_s))
        return span

    def _stage_spans(self, stats: RoundStats, parent: Span) -> None:
        """One after the other, as the round's statistics tell them apart."""
        context = set_span_in_context(parent, Context())
        begin_s = stats.started_unix_s
        for name, seconds, attributes in _stages(stats):
            span = self._tracer.start_span(
                name, context=context, attributes=attributes, start_time=_nanoseconds(begin_s)
            )
            begin_s += seconds
            span.end(_nanoseconds(begin_s))


class OtelSpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        """Keeps the error's type and message, not its traceback: logs have that."""
        self._span.set_attribute(names.ERROR_TYPE, type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))

    def end(self) -> None:
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.end()


class _PlannedIds(IdGenerator):
    """Random ids, except where a span's id was promised in a header before the span was written.

    A generator of its own, seeded by the system: ids of several processes stay apart where each of
    them seeds `random` alike.
    """

    def __init__(self) -> None:
        self._random = Random()
        self._planned = threading.local()

    def draw_span_id(self) -> int:
        return self._random.getrandbits(64) | 1  # zero means no span

    def next_span_is(self, span_id: int) -> "_Promise":
        return _Promise(self._planned, span_id)

    def generate_span_id(self) -> int:
        planned: int = getattr(self._planned, "span_id", 0)
        return planned or self.draw_span_id()

    def generate_trace_id(self) -> int:
        return self._random.getrandbits(128) | 1


class _Promise:
    """Within the block, this thread's spans get the promised id; 0 promises nothing."""

    def __init__(self, planned: threading.local, span_id: int) -> None:
        self._planned = planned
        self._span_id = span_id

    def __enter__(self) -> None:
        self._planned.span_id = self._span_id

    def __exit__(self, *_: object) -> None:
        self._planned.span_id = 0


def _exporter(process: str, endpoint: str | None, folder: Path | None) -> SpanExporter:
    if endpoint is not None:
        base = endpoint.rstrip("/")
        url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        return OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)
    assert folder is not None, "make_tracing asks for an endpoint or a folder"
    return OtlpJsonFile(folder / f"{process}.jsonl")


def _context(traceparent: str) -> Context:
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def _sampled(traceparents: Sequence[str | None]) -> list[str]:
    """Those that ask for a trace. They come from clients: what is not of the known form is none."""
    return [given for given in traceparents if given is not None and _SAMPLED.fullmatch(given)]


def _round_attributes(stats: RoundStats) -> dict[str, Attribute]:
    return {
        names.ROUND_ID: stats.round_id,
        names.COHORT: stats.cohort,
        names.NUM_REQUESTS: stats.num_requests,
        names.NUM_ROWS: stats.num_rows,
        names.PREFILL_ROWS: stats.num_prefill_rows,
        names.DRAFT_TOKENS: stats.num_drafted,
        names.ACCEPTED_TOKENS: stats.num_accepted,
        names.EMITTED_TOKENS: stats.num_emitted,
    }


def _stages(stats: RoundStats) -> tuple[tuple[str, float, dict[str, Attribute]], ...]:
    return (
        (names.SPAN_PLAN, stats.plan_s, {}),
        (names.SPAN_DRAFT, stats.draft_s, {names.DRAFT_TOKENS: stats.num_drafted}),
        (
            names.SPAN_TRANSFER,
            stats.queued_s + stats.transfer_s,
            {
                names.TRANSFER_BYTES: stats.sent_bytes,
                names.REPLY_BYTES: stats.received_bytes,
                names.QUEUED_SECONDS: stats.queued_s,
            },
        ),
        (
            names.SPAN_VERIFY,
            stats.verify_s,
            {
                names.NUM_ROWS: stats.num_rows,
                names.COLLECTIVE_SECONDS: stats.collective_s,
                names.COLLECTIVE_SENT_BYTES: stats.verify_group.sent_bytes,
                names.COLLECTIVE_RECEIVED_BYTES: stats.verify_group.received_bytes,
            },
        ),
        (names.SPAN_COMMIT, stats.commit_s, {names.ACCEPTED_TOKENS: stats.num_accepted}),
    )


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)
