"""OTLP as JSON lines in a file: one export request per line, the collector's own file format.

Written out by hand rather than through protobuf's JSON, which spells ids in base64 where OTLP/JSON
wants hex.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext

Json = dict[str, Any]


class OtlpJsonFile(SpanExporter):
    """Appends; every line is written whole before the next export begins."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("a")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        resources = groupby(spans, key=lambda span: span.resource)
        request = {"resourceSpans": [_resource(who, list(group)) for who, group in resources]}
        self._stream.write(json.dumps(request, separators=(",", ":")) + "\n")
        self._stream.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._stream.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def _resource(resource: Resource, spans: Sequence[ReadableSpan]) -> Json:
    scope = spans[0].instrumentation_scope
    return {
        "resource": {"attributes": _attributes(resource.attributes)},
        "scopeSpans": [
            {
                "scope": {"name": scope.name if scope is not None else ""},
                "spans": [_span(span) for span in spans],
            }
        ],
    }


def _span(span: ReadableSpan) -> Json:
    parent = {"parentSpanId": f"{span.parent.span_id:016x}"} if span.parent is not None else {}
    context = span.get_span_context()
    assert context is not None, "the SDK exports only spans that have an identity"
    return (
        _identity(context)
        | parent
        | {
            "name": span.name,
            "kind": span.kind.value + 1,  # OTLP counts from 1, the SDK from 0
            "startTimeUnixNano": str(span.start_time),
            "endTimeUnixNano": str(span.end_time),
            "attributes": _attributes(span.attributes or {}),
            "links": [_link(link) for link in span.links],
            "status": {"code": span.status.status_code.value}
            | ({"message": span.status.description} if span.status.description else {}),
        }
    )


def _link(link: Link) -> Json:
    return _identity(link.context)


def _identity(context: SpanContext) -> Json:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: object) -> Json:
    """OTLP names the type of every value; 64-bit integers are written as text."""
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list() | tuple():
            return {"arrayValue": {"values": [_value(entry) for entry in value]}}
        case _:
            return {"stringValue": str(value)}
