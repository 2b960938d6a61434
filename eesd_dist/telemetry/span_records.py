"""Finished spans as plain values, and the traces of requests that are made of them.

Every traced process keeps its latest spans in memory, so that traces can be read without a
collector: the ingress gathers the parts of a trace from all processes.
"""

from collections.abc import Iterable, Mapping, Sequence

from eesd_dist.telemetry import names
from eesd_dist.types import Value

Json = dict[str, object]


class SpanRecord(Value, frozen=True, kw_only=True):
    """A finished span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_unix_ns: int
    end_unix_ns: int
    process: str
    attributes: Mapping[str, object]

    @property
    def is_request(self) -> bool:
        """True if it is the span of a whole HTTP request."""
        return names.HTTP_METHOD in self.attributes


def traces_of(spans: Iterable[SpanRecord], *, request_id: str | None = None) -> list[Json]:
    """Returns the finished requests among these spans as JSON, the latest first; with a
    `request_id` those with this X-Request-Id or this id of the answer.

    Several requests may belong to one trace of their client: each gets its own part.
    """
    by_id = {span.span_id: span for span in spans}
    children: dict[str | None, list[SpanRecord]] = {}
    for span in sorted(by_id.values(), key=lambda span: (span.start_unix_ns, -span.end_unix_ns)):
        children.setdefault(span.parent_id, []).append(span)
    roots = sorted(
        (span for span in by_id.values() if span.is_request),
        key=lambda span: span.start_unix_ns,
        reverse=True,
    )
    traces: list[Json] = []
    for root in roots:
        family = _with_descendants(root, children)
        ids = _ids_of(family)
        if request_id is None or request_id in ids:
            shown = [_as_json(span) for span in family]
            traces.append({"request_id": ids[0] if ids else "", "spans": shown})
    return traces


def _with_descendants(
    root: SpanRecord, children: Mapping[str | None, Sequence[SpanRecord]]
) -> list[SpanRecord]:
    """Returns the root, and each span after its parent."""
    family = [root]
    for child in children.get(root.span_id, ()):
        family += _with_descendants(child, children)
    return family


def _ids_of(family: Sequence[SpanRecord]) -> list[str]:
    """Returns the names by which a client may know the request; its X-Request-Id is the first."""
    keys = (names.REQUEST_ID, names.GEN_AI_RESPONSE_ID)
    request_ids = (span.attributes.get(key) for span in family for key in keys)
    return [str(request_id_) for request_id_ in dict.fromkeys(request_ids) if request_id_]


def _as_json(span: SpanRecord) -> Json:
    return {
        "name": span.name,
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "start": span.start_unix_ns / 1e9,
        "end": span.end_unix_ns / 1e9,
        "process": span.process,
        "attributes": dict(span.attributes),
    }
