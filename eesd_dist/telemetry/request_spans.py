"""The spans of one HTTP request, and the W3C trace context that is passed with the request.

HTTP method and route         ingress       SERVER, HTTP attributes
  chat MODEL                  ingress       INTERNAL, gen_ai.* attributes and totals of the request
    eesd.route                ingress       for each attempt
    eesd.queue .prefill       drafting actor, in `start_spans`
    eesd.round                drafting actor, in `round_spans`
"""

from asyncio import CancelledError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from eesd_dist.telemetry import names
from eesd_dist.types import SamplingParams

Attributes = dict[str, AttributeValue]

_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED_DIGITS = frozenset("13579bdfBDF")
_FLAGS_END = 54
"""Index of the last digit of the flags in a traceparent."""


def context_of(traceparent: str | None, tracestate: str | None = None) -> Context:
    """Returns the context to open a span in. It is empty, so that the span begins a trace, when the
    client has sent no traceparent or an invalid one."""
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    carrier = {key: value for key, value in headers.items() if value is not None}
    return _PROPAGATOR.extract(carrier, context=Context())


def is_sampled(traceparent: str | None) -> bool:
    """Returns whether the request's trace is written. Cheap where it is not."""
    if traceparent is None or traceparent[_FLAGS_END : _FLAGS_END + 1] not in _SAMPLED_DIGITS:
        return False
    return get_current_span(context_of(traceparent)).get_span_context().trace_flags.sampled


def traceparent_of(span: Span) -> str | None:
    """Returns the traceparent that makes other spans children of `span`; None without a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=set_span_in_context(span, Context()))
    return carrier.get("traceparent")


def server_span(tracer: Tracer, name: str, *, parent: Context, attributes: Attributes) -> Span:
    """Begins the span of an HTTP request, by OpenTelemetry's conventions; the caller ends it."""
    return tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=attributes)


def request_span(
    tracer: Tracer,
    *,
    operation: str,
    model: str,
    traceparent: str | None,
    sampling: SamplingParams,
    stream: bool = False,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> AbstractContextManager[Span]:
    """Opens `chat MODEL` or `text_completion MODEL`, by the GenAI conventions, with more
    `attributes` of this project."""
    request_attributes: Attributes = {
        names.GEN_AI_OPERATION: operation,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_REQUEST_MODEL: model,
        names.GEN_AI_REQUEST_STREAM: stream,
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_SEED: _signed(sampling.seed),
        **(attributes or {}),
    }
    return _open(tracer, f"{operation} {model}", traceparent, request_attributes)


def route_span(
    tracer: Tracer, *, traceparent: str | None, request_id: str, num_interruptions: int = 0
) -> AbstractContextManager[Span]:
    """Opens the span of routing a request; the caller adds the pipeline when it is chosen."""
    attributes: Attributes = {names.REQUEST_ID: request_id, names.INTERRUPTIONS: num_interruptions}
    return _open(tracer, names.SPAN_ROUTE, traceparent, attributes)


def response_attributes(
    *,
    response_id: str,
    model: str,
    finish_reasons: Sequence[str],
    num_input_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int = 0,
) -> Attributes:
    """Returns the attributes of the request's span that are known when the answer is complete."""
    return {
        names.GEN_AI_RESPONSE_ID: response_id,
        names.GEN_AI_RESPONSE_MODEL: model,
        names.GEN_AI_FINISH_REASONS: list(finish_reasons),
        names.GEN_AI_INPUT_TOKENS: num_input_tokens,
        names.GEN_AI_OUTPUT_TOKENS: num_output_tokens,
        names.GEN_AI_CACHED_TOKENS: num_cached_tokens,
    }


@contextmanager
def _open(
    tracer: Tracer, name: str, traceparent: str | None, attributes: Attributes
) -> Iterator[Span]:
    """Opens a span for the block. An error is recorded with type and message; logs have the
    traceback. A client that leaves is none: the block is cancelled then, or its generator closed.

    The span does not become the current one: a stream may be closed in another context than it was
    opened in.
    """
    span = tracer.start_span(name, context_of(traceparent), attributes=attributes)
    try:
        yield span
    except (CancelledError, GeneratorExit):
        span.set_attribute(names.CLIENT_LEFT, True)
        raise
    except BaseException as error:
        span.set_attribute(names.ERROR_TYPE, type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        raise
    finally:
        span.end()


def _signed(seed: int) -> int:
    """Returns the same 64 bits as a signed integer, as in OTLP."""
    return (seed + 2**63) % 2**64 - 2**63
