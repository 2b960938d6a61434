"""Tracing of one process, on the OpenTelemetry API.

When off, the tracer is the API's no-op, the SDK is not loaded, and the round loop makes no span
call. Environment variables are not read here: endpoint and folder are passed in.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.trace import NoOpTracerProvider

from eesd_dist.telemetry.round_spans import RoundSpans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_FLUSH_TIMEOUT_MS = 5_000


class Tracing:
    """Owns the tracer of one process. Off without a provider."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self.tracer = (provider or NoOpTracerProvider()).get_tracer("eesd")
        self.rounds = RoundSpans(self.tracer) if provider is not None else None
        """None where tracing is off."""

    def flush(self) -> None:
        """Sends pending spans; call before a process is killed. If the collector does not answer,
        the exporter logs that and gives up within seconds."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_TIMEOUT_MS)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


def make_tracing(
    *,
    process: str,
    service: str = "eesd",
    endpoint: str | None = None,
    folder: Path | None = None,
) -> Tracing:
    """Returns tracing that exports OTLP over HTTP when there is an endpoint, otherwise OTLP-JSON
    lines to `<folder>/<process>.jsonl` when there is a folder, otherwise nothing.

    `process` names this process in every trace (service.instance.id).
    """
    if endpoint is None and folder is None:
        return Tracing()
    # Imported here so that a process that does not trace never loads the SDK.
    from eesd_dist.telemetry.provider import make_provider

    return Tracing(make_provider(process, service=service, endpoint=endpoint, folder=folder))
