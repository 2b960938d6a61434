"""Where the time of a request went, as spans joined across processes by W3C trace context.

`Tracing` is the seam: `NoTracing` costs nothing and knows no SDK; `OtelTracing` (module `otel`)
writes OTLP, over HTTP or into files. This module decides which spans there are and what they
carry. It refuses to know the environment: endpoint and folder are handed in at the rim.

One request's trace, with the process that writes each span:

    chat MODEL                    ingress       INTERNAL, gen_ai.* attributes
      eesd.route                  ingress
      eesd.round                  draft stage   written afterwards from RoundStats
        eesd.plan .draft .transfer .verify .commit
        eesd.verify.rank          verify rank   joined by the ids in the round's header

A round serves many requests. Every traced one gets an `eesd.round` span in its own trace, so that
each trace is whole; the stages stand under the first one only, and the others link to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from eesd_dist.telemetry import names
from eesd_dist.types import RoundStats, SamplingParams

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanIds:
    """The identity of a span, as it travels in a round's header. Zeros: nobody traces."""

    trace_id: int = 0
    span_id: int = 0

    def __bool__(self) -> bool:
        return self.span_id != 0


NO_IDS = SpanIds()


class OpenSpan(Protocol):
    """A span that has begun. Leaving its `with` block ends it, as failed when by an exception."""

    @property
    def traceparent(self) -> str | None:
        """Hand this to whatever works on the span's behalf; None when nobody traces."""
        ...

    def set(self, attributes: Attributes) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def end(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Tracing(Protocol):
    """One per process."""

    @property
    def is_on(self) -> bool: ...
    def open_span(
        self, name: str, *, traceparent: str | None = None, attributes: Attributes | None = None
    ) -> OpenSpan:
        """Begins a span under `traceparent`, or a trace of its own when there is none."""
        ...

    def round_ids(self, traceparents: Sequence[str | None]) -> SpanIds:
        """Before a round: the identity its `eesd.round` span will have, for the header."""
        ...

    def record_round(
        self, stats: RoundStats, *, ids: SpanIds = NO_IDS, attributes: Attributes | None = None
    ) -> None:
        """After a round: its spans, with the times it had."""
        ...

    def record_rank(
        self, ids: SpanIds, *, rank: int, num_rows: int, started_unix_s: float, seconds: float
    ) -> None:
        """On a verify rank, after a round whose header carried `ids`."""
        ...

    def flush(self) -> None:
        """Sends what is waiting; to be called before a process is killed. Where nobody listens the
        exporter logs it and gives up within seconds."""
        ...

    def close(self) -> None: ...


class NoSpan:
    """The span of a process that does not trace; what it was given it hands on."""

    def __init__(self, traceparent: str | None = None) -> None:
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str | None:
        return self._traceparent

    def set(self, attributes: Attributes) -> None:
        return

    def fail(self, error: BaseException) -> None:
        return

    def end(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return


class NoTracing:
    """Off."""

    @property
    def is_on(self) -> bool:
        return False

    def open_span(
        self, name: str, *, traceparent: str | None = None, attributes: Attributes | None = None
    ) -> OpenSpan:
        return NoSpan(traceparent)

    def round_ids(self, traceparents: Sequence[str | None]) -> SpanIds:
        return NO_IDS

    def record_round(
        self, stats: RoundStats, *, ids: SpanIds = NO_IDS, attributes: Attributes | None = None
    ) -> None:
        return

    def record_rank(
        self, ids: SpanIds, *, rank: int, num_rows: int, started_unix_s: float, seconds: float
    ) -> None:
        return

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


def make_tracing(
    *,
    process: str,
    service: str = "eesd",
    endpoint: str | None = None,
    folder: Path | None = None,
) -> Tracing:
    """OTLP over HTTP when there is an endpoint (OTEL_EXPORTER_OTLP_ENDPOINT, read by the caller),
    else OTLP-JSON lines in `<folder>/<process>.jsonl` when there is a folder, else nothing.

    `process` names this process in every trace (service.instance.id).
    """
    if endpoint is None and folder is None:
        return NoTracing()
    # Imported here so that a process that does not trace never loads the SDK.
    from eesd_dist.telemetry.otel import OtelTracing

    return OtelTracing(process=process, service=service, endpoint=endpoint, folder=folder)


def open_request_span(
    tracing: Tracing,
    *,
    operation: str,
    model: str,
    traceparent: str | None,
    sampling: SamplingParams | None = None,
    stream: bool = False,
) -> OpenSpan:
    """The HTTP side's span, `chat MODEL` or `text_completion MODEL`, by the GenAI conventions."""
    if not tracing.is_on:
        return NoSpan(traceparent)
    attributes: dict[str, Attribute] = {
        names.GEN_AI_OPERATION: operation,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_REQUEST_MODEL: model,
        names.GEN_AI_REQUEST_STREAM: stream,
    }
    if sampling is not None:
        attributes |= _sampling_attributes(sampling)
    return tracing.open_span(f"{operation} {model}", traceparent=traceparent, attributes=attributes)


def open_route_span(
    tracing: Tracing, *, traceparent: str | None, request_id: str, pipeline: str | None = None
) -> OpenSpan:
    """The choice of a pipeline; name it later with `set` when it is not known yet."""
    attributes = {names.REQUEST_ID: request_id}
    if pipeline is not None:
        attributes[names.PIPELINE] = pipeline
    return tracing.open_span(names.SPAN_ROUTE, traceparent=traceparent, attributes=attributes)


def response_attributes(
    *,
    response_id: str,
    model: str,
    finish_reasons: Sequence[str],
    num_input_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int = 0,
) -> dict[str, Attribute]:
    """What the HTTP side adds to its span when the answer is complete."""
    return {
        names.GEN_AI_RESPONSE_ID: response_id,
        names.GEN_AI_RESPONSE_MODEL: model,
        names.GEN_AI_FINISH_REASONS: list(finish_reasons),
        names.GEN_AI_INPUT_TOKENS: num_input_tokens,
        names.GEN_AI_OUTPUT_TOKENS: num_output_tokens,
        names.GEN_AI_CACHED_TOKENS: num_cached_tokens,
    }


def _sampling_attributes(sampling: SamplingParams) -> dict[str, Attribute]:
    return {
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_SEED: _signed(sampling.seed),
    }


def _signed(seed: int) -> int:
    """The same 64 bits as OTLP's integers can hold them."""
    return (seed + 2**63) % 2**64 - 2**63
