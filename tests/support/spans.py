"""Reads spans from the files of a trace folder."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSpan:
    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_us: float
    end_us: float
    attributes: Mapping[str, object]
    status: Mapping[str, object]
    links: tuple[str, ...]
    """Span ids."""


def read_spans(folder: Path) -> list[WrittenSpan]:
    """Returns the spans by time. A line that is still being written is left out."""
    lines = (
        line
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    )
    return sorted((s for line in lines for s in _spans(line)), key=lambda span: span.start_us)


def _spans(line: str) -> Iterator[WrittenSpan]:
    for resource in json.loads(line)["resourceSpans"]:
        process = str(_attributes(resource["resource"])["service.instance.id"])
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield _span(span, process)


def _span(data: Json, process: str) -> WrittenSpan:
    return WrittenSpan(
        process=process,
        name=data["name"],
        trace_id=data["traceId"],
        span_id=data["spanId"],
        parent_id=data.get("parentSpanId"),
        start_us=int(data["startTimeUnixNano"]) / 1000,
        end_us=int(data["endTimeUnixNano"]) / 1000,
        attributes=_attributes(data),
        status=data["status"],
        links=tuple(link["spanId"] for link in data.get("links", ())),
    )


def _attributes(item: Json) -> dict[str, object]:
    return {entry["key"]: _value(entry["value"]) for entry in item.get("attributes", ())}


def _value(value: Json) -> object:
    """OTLP names the type of every value; 64-bit integers come as text."""
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_value(entry) for entry in value["arrayValue"]["values"]]
    return next(iter(value.values()))
