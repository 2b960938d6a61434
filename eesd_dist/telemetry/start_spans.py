"""The spans of a request before its first token: `eesd.queue` until its first round, then
`eesd.prefill` until the end of the round with its first token."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import Attributes, context_of, is_sampled
from eesd_dist.telemetry.round_spans import RoundSpans
from eesd_dist.types import Emission, Request, RequestId, RoundStats


@dataclass(slots=True, kw_only=True)
class _Start:
    """A traced request without a token."""

    traceparent: str
    arrived_unix_s: float
    num_tokens: int
    """Tokens of its prompt, and of its text so far if it goes on here."""
    began_unix_s: float | None = None
    """None before its first round."""


class StartSpans:
    """Writes them from the statistics of rounds, in the event loop of the drafting actor."""

    def __init__(self, spans: RoundSpans) -> None:
        self._spans = spans
        self._waiting: dict[RequestId, _Start] = {}

    def arrived(self, request: Request) -> None:
        traceparent = request.traceparent
        if traceparent is not None and is_sampled(traceparent):
            self._waiting[request.request_id] = _Start(
                traceparent=traceparent,
                arrived_unix_s=time.time(),
                num_tokens=len(request.prompt) + len(request.generated),
            )

    def left(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)

    def record(
        self,
        stats: RoundStats,
        emissions: Sequence[Emission],
        *,
        resubmitted: Collection[RequestId] = (),
    ) -> None:
        """Records a round and what it has emitted. `resubmitted`: requests with emissions of an
        earlier submission."""
        if not self._waiting:
            return
        for request_id in stats.request_ids:
            start = self._waiting.get(request_id)
            if start is not None and start.began_unix_s is None:
                start.began_unix_s = max(stats.started_unix_s, start.arrived_unix_s)
                self._write(names.SPAN_QUEUE, request_id, start.arrived_unix_s, start.began_unix_s)
        for emission in emissions:
            start = self._waiting.get(emission.request_id)
            if start is None or start.began_unix_s is None or emission.request_id in resubmitted:
                continue
            if emission.tokens:
                end_s = max(stats.started_unix_s + stats.elapsed_s, start.began_unix_s)
                self._write(names.SPAN_PREFILL, emission.request_id, start.began_unix_s, end_s)
                del self._waiting[emission.request_id]

    def _write(self, name: str, request_id: RequestId, begin_s: float, end_s: float) -> None:
        start = self._waiting[request_id]
        attributes: Attributes = {names.REQUEST_ID: request_id, names.NUM_TOKENS: start.num_tokens}
        self._spans.write(name, context_of(start.traceparent), attributes, begin_s, end_s)
