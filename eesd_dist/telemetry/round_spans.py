"""The spans of rounds, written from the statistics that rounds return.

    eesd.round                    drafting actor, under each request's own span
      eesd.plan .draft .transfer .verify .commit
      eesd.verify.rank            verify rank, joined by the ids in the round's header

A round serves many requests. Every traced one gets an `eesd.round` span in its own trace, so that
each trace is complete. The stages' spans are children of the first of these only; the others link
to it.
"""

from collections.abc import Iterator, Sequence
from random import Random

from opentelemetry.context import Context, attach, create_key, detach, set_value
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import Attributes, context_of
from eesd_dist.types import RoundStats

PROMISED_SPAN_ID = create_key("promised-span-id")
"""Context key of the id for the next span, which was sent in a round's header."""


class RoundSpans:
    """Writes the spans of a round after the round, from its statistics, so that tokens leave first
    and nothing is measured twice. Exists only where tracing is on."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._random = Random()

    def ids(self, traceparents: Sequence[str | None]) -> tuple[int, int]:
        """Returns trace id and span id for the header of a round of these requests; zeros when
        none of them is traced."""
        first = next(_sampled(traceparents), None)
        if first is None:
            return 0, 0
        return get_current_span(first).get_span_context().trace_id, random_id(self._random, 64)

    def record_round(self, stats: RoundStats) -> None:
        parents = list(_sampled(stats.traceparents))
        if not parents:
            return
        promise = attach(set_value(PROMISED_SPAN_ID, stats.span_id))
        try:
            first = self._round(stats, parents[0])
        finally:
            detach(promise)
        inside, begin_s = set_span_in_context(first), stats.started_unix_s
        for name, seconds, attributes in _stages(stats):
            self._write(name, inside, attributes, begin_s, seconds)
            begin_s += seconds
        for parent in parents[1:]:
            self._round(stats, parent, Link(first.get_span_context()))

    def record_rank(
        self,
        *,
        trace_id: int,
        span_id: int,
        rank: int,
        num_rows: int,
        started_unix_s: float,
        seconds: float,
    ) -> None:
        """Writes a verify rank's span, under the round's span with these ids from the header."""
        if span_id == 0:
            return
        parent = SpanContext(trace_id, span_id, True, TraceFlags(TraceFlags.SAMPLED))
        self._write(
            names.SPAN_VERIFY_RANK,
            set_span_in_context(NonRecordingSpan(parent)),
            {names.RANK: rank, names.NUM_ROWS: num_rows},
            started_unix_s,
            seconds,
        )

    def _round(self, stats: RoundStats, parent: Context, *links: Link) -> Span:
        attributes: Attributes = {
            names.ROUND_ID: stats.round_id,
            names.MICROBATCH: stats.microbatch,
            names.NUM_REQUESTS: stats.num_requests,
            names.NUM_ROWS: stats.num_rows,
            names.PREFILL_ROWS: stats.num_prefill_rows,
            names.DRAFT_TOKENS: stats.num_drafted,
            names.LOOKUP_TOKENS: stats.num_lookup_drafted,
            names.ACCEPTED_TOKENS: stats.num_accepted,
            names.EMITTED_TOKENS: stats.num_emitted,
        }
        return self._write(
            names.SPAN_ROUND, parent, attributes, stats.started_unix_s, stats.total_s, *links
        )

    def _write(
        self,
        name: str,
        parent: Context,
        attributes: Attributes,
        begin_s: float,
        seconds: float,
        *links: Link,
    ) -> Span:
        begin_ns, end_ns = int(begin_s * 1e9), int((begin_s + seconds) * 1e9)
        span = self._tracer.start_span(
            name, parent, attributes=attributes, links=links, start_time=begin_ns
        )
        span.end(end_ns)
        return span


def random_id(source: Random, num_bits: int) -> int:
    """Returns an id that is not zero (zero means none). `source` is not the `random` module:
    processes with equal seeds of it would have equal ids."""
    return source.getrandbits(num_bits) | 1


def _sampled(traceparents: Sequence[str | None]) -> Iterator[Context]:
    """Yields the contexts of requests with a sampled trace."""
    for traceparent in traceparents:
        context = context_of(traceparent)
        if get_current_span(context).get_span_context().trace_flags.sampled:
            yield context


def _stages(stats: RoundStats) -> tuple[tuple[str, float, Attributes], ...]:
    """Returns name, seconds and attributes of each stage, in order."""
    return (
        (names.SPAN_PLAN, stats.plan_s, {}),
        (
            names.SPAN_DRAFT,
            stats.draft_s,
            {
                names.DRAFT_TOKENS: stats.num_drafted,
                names.LOOKUP_TOKENS: stats.num_lookup_drafted,
            },
        ),
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
