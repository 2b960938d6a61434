"""Tracing of one process, on the OpenTelemetry API.

When off, the tracer is the API's no-op, the SDK is not loaded, and the round loop makes no span
call.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from opentelemetry.trace import NoOpTracerProvider

from eesd_dist.telemetry.round_spans import RoundSpans
from eesd_dist.telemetry.span_records import SpanRecord
from eesd_dist.telemetry.tracing_options import MAX_ROUND_SPANS, TracingOptions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_FLUSH_TIMEOUT_MS = 5_000


class KeptSpans(Protocol):
    """The latest spans of this process."""

    def read(self, trace_ids: Collection[str] | None = None) -> tuple[SpanRecord, ...]:
        """Returns those of these traces; None: of all."""
        ...


class Tracing:
    """Owns the tracer of one process. Off without a provider."""

    def __init__(
        self,
        provider: "TracerProvider | None" = None,
        *,
        span_store: KeptSpans | None = None,
        max_round_spans: int = MAX_ROUND_SPANS,
    ) -> None:
        self._provider = provider
        self._span_store = span_store
        self.tracer = (provider or NoOpTracerProvider()).get_tracer("eesd")
        self.rounds = (
            None if provider is None else RoundSpans(self.tracer, max_rounds=max_round_spans)
        )
        """None where tracing is off."""

    @property
    def is_on(self) -> bool:
        return self._provider is not None

    def spans(self, trace_ids: Collection[str] | None = None) -> tuple[SpanRecord, ...]:
        """Returns the kept spans of these traces; None: of all."""
        return () if self._span_store is None else self._span_store.read(trace_ids)

    def flush(self) -> None:
        """Sends pending spans; call before a process is killed. If the collector does not answer,
        the exporter logs that and gives up within seconds."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_TIMEOUT_MS)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


def make_tracing(options: TracingOptions, *, process: str) -> Tracing:
    """Returns tracing that exports over OTLP when there is an endpoint, otherwise OTLP-JSON lines
    to `<folder>/<process>.jsonl` when there is a folder.

    `process` names this process in every trace (service.instance.id).
    """
    if not options.is_on:
        return Tracing()
    # Imported here so that a process that does not trace never loads the SDK.
    from eesd_dist.telemetry.provider import make_provider

    provider, span_store = make_provider(options, process=process)
    return Tracing(provider, span_store=span_store, max_round_spans=options.max_round_spans)
