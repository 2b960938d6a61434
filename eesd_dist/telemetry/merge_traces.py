"""Trace files of many processes, read back and merged into one picture.

Reads the OTLP-JSON lines that tracing without a collector leaves behind, and writes the Chrome
trace format, which ui.perfetto.dev and chrome://tracing show with no server. Standard library only.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd_dist.errors import CheckpointError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """One span as it was written; ids in hex."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_us: float
    end_us: float
    attributes: Mapping[str, object]


def read_spans(files: Iterable[Path]) -> list[TraceSpan]:
    """Every span in these files, by time. A last line cut short by a killed process is left out."""
    spans = [span for file in files for line in _whole_lines(file) for span in _spans(line, file)]
    return sorted(spans, key=lambda span: span.start_us)


def chrome_trace(spans: Sequence[TraceSpan]) -> Json:
    """Processes become processes, each trace a row in them, and arrows join a child to its parent
    in another process."""
    pids = {name: i + 1 for i, name in enumerate(sorted({span.process for span in spans}))}
    rows = {trace: i + 1 for i, trace in enumerate(dict.fromkeys(s.trace_id for s in spans))}
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    events: list[Json] = [_process_name(pid, name) for name, pid in pids.items()]
    for span in spans:
        place = {"pid": pids[span.process], "tid": rows[span.trace_id]}
        events.append(_complete(span) | place)
        parent = by_id.get((span.trace_id, span.parent_id or ""))
        if parent is not None and parent.process != span.process:
            events += _arrow(parent, span, from_pid=pids[parent.process], **place)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merge_traces(folder: Path, target: Path) -> int:
    """Every `*.jsonl` under `folder` into one Chrome trace file; returns the number of spans."""
    spans = read_spans(sorted(folder.glob("*.jsonl")))
    target.write_text(json.dumps(chrome_trace(spans)))
    return len(spans)


def _whole_lines(file: Path) -> Iterator[str]:
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield line


def _spans(line: str, file: Path) -> Iterator[TraceSpan]:
    try:
        request = json.loads(line)
    except json.JSONDecodeError as error:
        raise CheckpointError(file=file, found=str(error), expected="OTLP-JSON lines") from error
    for resource in request.get("resourceSpans", ()):
        described = _attributes(resource.get("resource", {}))
        process = str(described.get("service.instance.id", file.stem))
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield _span(span, process)


def _span(data: Json, process: str) -> TraceSpan:
    return TraceSpan(
        process=process,
        name=data["name"],
        trace_id=data["traceId"],
        span_id=data["spanId"],
        parent_id=data.get("parentSpanId") or None,
        start_us=int(data["startTimeUnixNano"]) / 1000,
        end_us=int(data["endTimeUnixNano"]) / 1000,
        attributes=_attributes(data),
    )


def _attributes(item: Json) -> dict[str, object]:
    return {entry["key"]: _value(entry["value"]) for entry in item.get("attributes", ())}


def _value(value: Json) -> object:
    """OTLP names the type of every value; 64-bit integers come as text."""
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_value(entry) for entry in value["arrayValue"].get("values", ())]
    return next(iter(value.values()), None)


def _process_name(pid: int, name: str) -> Json:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _complete(span: TraceSpan) -> Json:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "eesd",
        "ts": span.start_us,
        "dur": span.end_us - span.start_us,
        "args": dict(span.attributes) | {"trace_id": span.trace_id, "span_id": span.span_id},
    }


def _arrow(parent: TraceSpan, child: TraceSpan, *, from_pid: int, pid: int, tid: int) -> list[Json]:
    shared = {"name": "calls", "cat": "eesd", "id": child.span_id, "tid": tid}
    begin = min(max(parent.start_us, child.start_us), parent.end_us)
    return [
        shared | {"ph": "s", "pid": from_pid, "ts": begin},
        shared | {"ph": "f", "bp": "e", "pid": pid, "ts": child.start_us},
    ]
