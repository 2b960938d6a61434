"""`eesd trace`: the latest requests of a running service, as waterfalls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from typer import Argument, echo

from eesd_dist.errors import ConfigError
from serve_app.cli.running_service import RunningService, echo_json

if TYPE_CHECKING:
    from rich.console import RenderableType

Span = Mapping[str, Any]

_BAR_CHARS = 40
_TIME_CHARS = 10
_PROCESS_CHARS = 31
_MIN_CHARS = 10
_ROUNDING = 1e-3
"""More than times lose as floats."""
_FOLDED = "eesd.round"
"""Spans below these are shown with --stages only."""
_TOTALS = (
    ("http.response.status_code", "status"),
    ("gen_ai.usage.input_tokens", "prompt tokens"),
    ("gen_ai.usage.output_tokens", "output tokens"),
    ("eesd.rounds", "rounds"),
    ("eesd.draft.tokens", "drafted"),
    ("eesd.accepted.tokens", "accepted"),
    ("eesd.request.interruptions", "interruptions"),
    ("error.type", "error"),
)


def trace(
    service: RunningService,
    request_id: Annotated[
        str | None, Argument(metavar="[ID]", help="X-Request-Id, or the id of the answer")
    ] = None,
    limit: Annotated[int, "number of latest requests, without an ID"] = 1,
    stages: Annotated[bool, "also what happened within each round"] = False,
    perfetto: Annotated[
        Path | None, "--perfetto FILE: writes a file for ui.perfetto.dev instead"
    ] = None,
) -> None:
    """Shows where the time of the latest requests went.

    The service keeps the traces of its latest requests in memory; a busy one traces only some of
    them, unless OTEL_TRACES_SAMPLER says otherwise.
    """
    if request_id is None:
        traces = service.page(f"/debug/traces?limit={limit}", shape={"traces": list})["traces"]
    else:
        page = f"/debug/traces/{quote(request_id, safe='')}"
        absent = (
            f"the service keeps no trace of a request {request_id}: it was not traced, or long ago"
        )
        traces = [service.page(page, shape={"spans": list}, absent=absent)]
    if perfetto is not None:
        _write(perfetto, traces)
        echo(f"written: {perfetto} ({len(traces)} requests); open it at https://ui.perfetto.dev")
    elif service.json:
        echo_json(traces)
    else:
        _show(traces, with_stages=stages)


def _show(traces: Sequence[Mapping[str, Any]], *, with_stages: bool) -> None:
    from rich.console import Console

    if not traces:
        echo("no requests yet, or none was traced")
    console = Console()
    for trace in reversed(traces):  # the latest one last, where a terminal shows it
        for renderable in waterfall(trace, with_stages=with_stages, width=console.width):
            console.print(renderable)


def _write(file: Path, traces: Sequence[Mapping[str, Any]]) -> None:
    try:
        file.write_text(json.dumps(perfetto_of(traces)))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}: name another file") from error


def waterfall(
    trace: Mapping[str, Any], *, with_stages: bool, width: int
) -> "Iterator[RenderableType]":
    """Yields a line of totals, and a table of this width with a row for each span."""
    from rich.table import Table
    from rich.text import Text

    spans: Sequence[Span] = trace["spans"]
    begin_s = min(span["start"] for span in spans)
    whole_s = max(max(span["end"] for span in spans) - begin_s, 1e-9)
    # Ids and names are text of clients: no markup.
    head = Text(str(trace["request_id"] or "no id"), style="bold")
    yield head.append(f"  {1e3 * whole_s:.1f} ms  {_totals(spans)}", style="not bold")
    rows = [("  " * depth + span["name"], span) for depth, span in _rows(spans, with_stages)]
    name_chars = max(len(name) for name, _ in rows)
    left = max(width - name_chars - 2 * _TIME_CHARS - 4, 2 * _MIN_CHARS)
    bar_chars = max(min(_BAR_CHARS, left - _PROCESS_CHARS), _MIN_CHARS)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("span", width=name_chars, no_wrap=True)
    table.add_column("", width=bar_chars, no_wrap=True)
    table.add_column("begins, ms", width=_TIME_CHARS, no_wrap=True, justify="right")
    table.add_column("takes, ms", width=_TIME_CHARS, no_wrap=True, justify="right")
    table.add_column("process", max_width=left - bar_chars, no_wrap=True)
    for name, span in rows:
        start_s, took_s = span["start"] - begin_s, span["end"] - span["start"]
        table.add_row(
            Text(name),
            _bar(start_s / whole_s, took_s / whole_s, num_chars=bar_chars),
            f"{1e3 * start_s:.1f}",
            f"{1e3 * took_s:.1f}",
            Text(span["process"]),
        )
    yield table


def _rows(spans: Sequence[Span], with_stages: bool) -> Iterator[tuple[int, Span]]:
    """Yields each span with its depth, after its parent; children in the order of their start."""
    depths: dict[str, int] = {}
    folded: set[str] = set()
    for span in spans:
        depth = depths[span["span_id"]] = depths.get(span["parent_id"], -1) + 1
        if span["parent_id"] in folded:
            folded.add(span["span_id"])
            continue
        if span["name"] == _FOLDED and not with_stages:
            folded.add(span["span_id"])
        yield depth, span


def _bar(start: float, share: float, *, num_chars: int) -> str:
    first = min(int(start * num_chars + _ROUNDING), num_chars - 1)
    length = min(max(round(share * num_chars), 1), num_chars - first)
    return " " * first + "█" * length


def _totals(spans: Sequence[Span]) -> str:
    totals: dict[str, object] = {}
    for span in spans:
        if span["name"] == _FOLDED:
            break
        totals = {**span["attributes"], **totals}
    return ", ".join(f"{label} {totals[key]}" for key, label in _TOTALS if key in totals)


def perfetto_of(traces: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Returns spans as Chrome's trace events, which Perfetto reads: a process for each of ours.

    Spans on one track have to contain each other or be apart, so that those which overlap, such as
    two rounds in flight, are put on tracks of their own.
    """
    spans: list[Span] = [span for trace in traces for span in trace["spans"]]
    spans.sort(key=lambda span: (span["start"], -span["end"]))
    pids = {name: pid for pid, name in enumerate(sorted({s["process"] for s in spans}), start=1)}
    tracks: dict[int, list[list[float]]] = {pid: [] for pid in pids.values()}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for name, pid in pids.items()
    ]
    for span in spans:
        pid = pids[span["process"]]
        events.append(
            {
                "ph": "X",
                "name": span["name"],
                "pid": pid,
                "tid": _track_for(span, tracks[pid]) + 1,
                "ts": 1e6 * span["start"],
                "dur": 1e6 * (span["end"] - span["start"]),
                "args": {**span["attributes"], "trace_id": span["trace_id"]},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track_for(span: Span, tracks: list[list[float]]) -> int:
    """Returns the first track on which the span fits, and adds it there. A track has the ends of
    the spans that are open on it, the outermost first."""
    for number, ends in enumerate(tracks):
        while ends and ends[-1] <= span["start"]:
            ends.pop()
        if not ends or ends[-1] >= span["end"]:
            ends.append(span["end"])
            return number
    tracks.append([span["end"]])
    return len(tracks) - 1
