"""The spans of one HTTP request, and the W3C trace context that is passed with the request.

chat MODEL                    ingress       INTERNAL, gen_ai.* attributes
  eesd.route                  ingress
  eesd.round                  drafting actor, in `round_spans`
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from eesd_dist.telemetry import names
from eesd_dist.types import SamplingParams

Attributes = dict[str, AttributeValue]

_PROPAGATOR = TraceContextTextMapPropagator()


def context_of(traceparent: str | None) -> Context:
    """Returns the context to open a span in. It is empty, so that the span begins a trace, when the
    client has sent no traceparent or an invalid one."""
    carrier = {} if traceparent is None else {"traceparent": traceparent}
    return _PROPAGATOR.extract(carrier, context=Context())


def traceparent_of(span: Span) -> str | None:
    """Returns the traceparent that makes other spans children of `span`; None without a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=set_span_in_context(span, Context()))
    return carrier.get("traceparent")


def request_span(
    tracer: Tracer,
    *,
    operation: str,
    model: str,
    traceparent: str | None,
    sampling: SamplingParams,
    stream: bool = False,
) -> AbstractContextManager[Span]:
    """Opens `chat MODEL` or `text_completion MODEL`, by the GenAI conventions."""
    attributes: Attributes = {
        names.GEN_AI_OPERATION: operation,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_REQUEST_MODEL: model,
        names.GEN_AI_REQUEST_STREAM: stream,
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_SEED: _signed(sampling.seed),
    }
    return _open(tracer, f"{operation} {model}", traceparent, attributes)


def route_span(
    tracer: Tracer, *, traceparent: str | None, request_id: str
) -> AbstractContextManager[Span]:
    """Opens the span of routing a request; the caller adds the pipeline when it is chosen."""
    return _open(tracer, names.SPAN_ROUTE, traceparent, {names.REQUEST_ID: request_id})


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
    """Opens a span for the block. An exception is recorded with type and message; logs have the
    traceback.

    The span does not become the current one: a stream may be closed in another context than it was
    opened in.
    """
    parent = context_of(traceparent)
    with tracer.start_span(name, parent, attributes=attributes, record_exception=False) as span:
        try:
            yield span
        except BaseException as error:
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            raise


def _signed(seed: int) -> int:
    """Returns the same 64 bits as a signed integer, as in OTLP."""
    return (seed + 2**63) % 2**64 - 2**63
