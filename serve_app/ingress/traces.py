"""The latest requests as traces, gathered from the processes that served them.

Every process keeps its own spans in memory. An ingress asks the other ingresses which requests
there were, and the pipelines for their parts of those.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from eesd_dist.errors import EngineError
from eesd_dist.telemetry.span_records import Json, SpanRecord, traces_of
from eesd_dist.telemetry.tracing import Tracing
from serve_app.ingress.replicas import of_all

_ANSWER_TIMEOUT_S = 5.0
_GRACE_S = 1.0
"""Time that the others have left after the first answer: a trace without them is worth showing."""


class Traces:
    """Reads the traces that one service keeps."""

    def __init__(self, own: Tracing, *, ingresses: Callable[[], Any], pipelines: Any) -> None:
        """Serve's handles of the deployments; that of the ingresses exists when they run."""
        self._own = own
        self._ingresses = ingresses
        self._pipelines = pipelines

    async def read(self, *, limit: int, request_id: str | None = None) -> list[Json]:
        """Returns the latest requests, the latest first; with a `request_id` those with this id."""
        if not self._own.is_on:
            return []
        spans = list(self._own.spans()) + await _spans_of(self._ingresses())
        traces = traces_of(spans, request_id=request_id)[:limit]
        trace_ids = _trace_ids(traces)
        if trace_ids:
            spans += await _spans_of(self._pipelines, trace_ids)
        return traces_of(spans, request_id=request_id)[:limit]


def _trace_ids(traces: Sequence[Json]) -> tuple[str, ...]:
    spans = [span for trace in traces for span in trace["spans"]]  # type: ignore[attr-defined]
    return tuple(dict.fromkeys(span["trace_id"] for span in spans))


async def _spans_of(deployment: Any, *args: object) -> list[SpanRecord]:
    """Returns the spans of all replicas that answer."""
    answers: tuple[tuple[SpanRecord, ...], ...] = ()
    with suppress(EngineError):  # none answers
        answers = await of_all(
            deployment, "spans", *args, timeout_s=_ANSWER_TIMEOUT_S, grace_s=_GRACE_S
        )
    return [span for answer in answers for span in answer]
