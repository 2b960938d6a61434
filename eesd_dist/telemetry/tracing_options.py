"""Options of tracing; they travel to every process of a service."""

from dataclasses import dataclass
from typing import Literal

OtlpProtocol = Literal["http/protobuf", "grpc"]

MAX_ROUND_SPANS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions:
    """Options of what is traced, and where spans go. Without an exporter and kept traces it is
    off."""

    endpoint: str | None = None
    """Base URL of a collector."""
    protocol: OtlpProtocol = "http/protobuf"
    folder: str | None = None
    """Folder for a file of spans, where there is no collector."""
    sampler: str | None = None
    """Sampler as in OTEL_TRACES_SAMPLER, which it overrides; `sampler_arg` likewise."""
    sampler_arg: str | None = None
    max_traces_kept: int = 0
    """Maximum number of traces in the memory of this process."""
    max_round_spans: int = MAX_ROUND_SPANS
    """Maximum number of spans of rounds for each request; see `RoundSpans`."""

    @property
    def exports(self) -> bool:
        return self.endpoint is not None or self.folder is not None

    @property
    def is_on(self) -> bool:
        return self.exports or self.max_traces_kept > 0
