"""The spans of rounds, written from the statistics that rounds return.

    eesd.round                    drafting actor, under the span of each traced request
      eesd.plan .draft .verify .commit
      eesd.verify.rank            verify rank, joined by the ids in the round's header

A round serves many requests. Every traced one gets an `eesd.round` span in its own trace, so that
each trace is complete. The stages' spans are children of the first of these only; the others link
to it.

Parents contain their children: a round ends with its commit, `eesd.verify` lasts from sending to
having the verdict, and a rank's span ends before the rank contributes its last part to the verdict.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
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
from eesd_dist.telemetry.request_spans import Attributes, context_of, is_sampled
from eesd_dist.types import NO_TRACE, RoundStats, RoundTrace

PROMISED_SPAN_ID = create_key("promised-span-id")
"""Context key of the id for the next span, which was sent in a round's header."""

_NUM_COUNTED = 4096
"""Requests to count the rounds of: the latest."""


@dataclass(slots=True, kw_only=True)
class _Traced:
    """A sampled request."""

    context: Context
    num_rounds: int = 0


class RoundSpans:
    """Writes the spans of a round after the round, from its statistics, so that tokens leave first
    and nothing is measured twice. Exists only where tracing is on."""

    def __init__(self, tracer: Tracer, *, max_rounds: int) -> None:
        """`max_rounds`: of a request that get a span each; after them the 2^n-th ones do."""
        self._tracer = tracer
        self._max_rounds = max_rounds
        self._traced: OrderedDict[str, _Traced] = OrderedDict()
        """The latest sampled requests, by traceparent. Only the round loop's thread changes it."""
        self._random = Random()

    def trace_round(self, traceparents: Sequence[str | None]) -> RoundTrace:
        """Decides which traces have the next round of these requests. Choices of one request are
        one."""
        parents = tuple(
            parent for parent in dict.fromkeys(traceparents) if parent and self._has_next(parent)
        )
        if not parents:
            return NO_TRACE
        first = get_current_span(self._context_of(parents[0])).get_span_context()
        return RoundTrace(
            trace_id=first.trace_id, span_id=random_id(self._random, 64), parents=parents
        )

    def record_round(self, stats: RoundStats) -> None:
        if not stats.trace.parents:
            return
        first, *others = stats.trace.parents
        promise = attach(set_value(PROMISED_SPAN_ID, stats.trace.span_id))
        try:
            whole = self._round(stats, first)
        finally:
            detach(promise)
        # Whole nanoseconds: Unix times as floats are a quarter of a microsecond apart.
        inside, begin_ns = set_span_in_context(whole), _ns(stats.started_unix_s)
        for name, length_ns, attributes in _stages(stats):
            self._write(name, inside, attributes, begin_ns, begin_ns + length_ns)
            begin_ns += length_ns
        for parent in others:
            self._round(stats, parent, Link(whole.get_span_context()))

    def record_rank(
        self,
        *,
        trace_id: int,
        span_id: int,
        rank: int,
        num_rows: int,
        began_unix_s: float,
        ended_unix_s: float,
    ) -> None:
        """Writes a verify rank's span, under the round's span with these ids from the header."""
        parent = SpanContext(trace_id, span_id, True, TraceFlags(TraceFlags.SAMPLED))
        self.write(
            names.SPAN_VERIFY_RANK,
            set_span_in_context(NonRecordingSpan(parent)),
            {names.RANK: rank, names.NUM_ROWS: num_rows},
            began_unix_s,
            ended_unix_s,
        )

    def write(
        self,
        name: str,
        parent: Context,
        attributes: Attributes,
        begin_unix_s: float,
        end_unix_s: float,
    ) -> None:
        """Writes a span of the past."""
        self._write(name, parent, attributes, _ns(begin_unix_s), _ns(end_unix_s))

    def _write(
        self,
        name: str,
        parent: Context,
        attributes: Attributes,
        begin_ns: int,
        end_ns: int,
        *links: Link,
    ) -> Span:
        span = self._tracer.start_span(
            name, parent, attributes=attributes, links=links, start_time=begin_ns
        )
        span.end(end_ns)
        return span

    def _has_next(self, traceparent: str) -> bool:
        """Counts a round of the request and returns whether it gets a span."""
        traced = self._traced.get(traceparent)
        if traced is None:
            if not is_sampled(traceparent):
                return False
            traced = self._traced[traceparent] = _Traced(context=context_of(traceparent))
            if len(self._traced) > _NUM_COUNTED:
                self._traced.popitem(last=False)
        else:
            self._traced.move_to_end(traceparent)
        number = traced.num_rounds = traced.num_rounds + 1
        return number <= self._max_rounds or number & (number - 1) == 0

    def _context_of(self, traceparent: str) -> Context:
        """Parses it only where it is not known: a round may have many."""
        traced = self._traced.get(traceparent)
        return context_of(traceparent) if traced is None else traced.context

    def _round(self, stats: RoundStats, parent: str, *links: Link) -> Span:
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
        begin_ns = _ns(stats.started_unix_s)
        end_ns = begin_ns + _ns(stats.elapsed_s)
        context = self._context_of(parent)
        return self._write(names.SPAN_ROUND, context, attributes, begin_ns, end_ns, *links)


def random_id(source: Random, num_bits: int) -> int:
    """Returns an id that is not zero (zero means none). `source` is not the `random` module:
    processes with equal seeds of it would have equal ids."""
    return source.getrandbits(num_bits) | 1


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _stages(stats: RoundStats) -> tuple[tuple[str, int, Attributes], ...]:
    """Returns name, nanoseconds and attributes of each stage, in order; together they are the whole
    round."""
    plan_ns, draft_ns, commit_ns = _ns(stats.plan_s), _ns(stats.draft_s), _ns(stats.commit_s)
    return (
        (names.SPAN_PLAN, plan_ns, {}),
        (
            names.SPAN_DRAFT,
            draft_ns,
            {
                names.DRAFT_TOKENS: stats.num_drafted,
                names.LOOKUP_TOKENS: stats.num_lookup_drafted,
            },
        ),
        (
            names.SPAN_VERIFY,
            _ns(stats.elapsed_s) - plan_ns - draft_ns - commit_ns,
            {
                names.NUM_ROWS: stats.num_rows,
                names.QUEUED_SECONDS: stats.queued_s,
                names.TRANSFER_SECONDS: stats.transfer_s,
                names.TRANSFER_BYTES: stats.sent_bytes,
                names.REPLY_BYTES: stats.received_bytes,
                names.VERIFY_SECONDS: stats.verify_s,
                names.COLLECTIVE_SECONDS: stats.collective_s,
                names.COLLECTIVE_SENT_BYTES: stats.verify_group.sent_bytes,
                names.COLLECTIVE_RECEIVED_BYTES: stats.verify_group.received_bytes,
            },
        ),
        (names.SPAN_COMMIT, commit_ns, {names.ACCEPTED_TOKENS: stats.num_accepted}),
    )
