"""Sets up the OpenTelemetry SDK and its exporters. Imported only where tracing is on."""

import json
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from random import Random

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import get_value
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from eesd_dist.telemetry.round_spans import PROMISED_SPAN_ID, random_id

_EXPORT_TIMEOUT_S = 5.0
_SCHEDULE_DELAY_MS = 500.0
"""A process that is killed loses at most the spans of this time."""
_MAX_WAITING = 8192
_IDS = {"traceId", "spanId", "parentSpanId"}


def make_provider(
    process: str, *, service: str, endpoint: str | None, folder: Path | None
) -> TracerProvider:
    """Returns a new provider; does not change the global one."""
    provider = TracerProvider(
        resource=Resource({"service.name": service, "service.instance.id": process}),
        id_generator=_Ids(),
    )
    exporter: SpanExporter
    if endpoint is not None:
        base = endpoint.rstrip("/").removesuffix("/v1/traces")
        exporter = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=_EXPORT_TIMEOUT_S)
    else:
        assert folder is not None, "make_tracing asks for an endpoint or a folder"
        exporter = OtlpJsonFile(folder / f"{process}.jsonl")
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter, max_queue_size=_MAX_WAITING, schedule_delay_millis=_SCHEDULE_DELAY_MS
        )
    )
    return provider


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
