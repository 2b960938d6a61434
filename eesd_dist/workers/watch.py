"""The drafting actor's telemetry: metrics, spans and the latest rounds.

Works on the statistics that rounds return, after their tokens have left. It measures only when
requests arrive and when their tokens leave.
"""

import time
from collections import deque
from collections.abc import Collection, Sequence
from itertools import zip_longest

from eesd_dist.routing.activity import FIRST_TOKEN_WINDOW_S, Activity, RecentRounds
from eesd_dist.telemetry.metrics import RequestTimings, ServiceMetrics
from eesd_dist.telemetry.span_records import SpanRecord
from eesd_dist.telemetry.start_spans import StartSpans
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import (
    Emission,
    FinishReason,
    RecorderCounts,
    Request,
    RequestId,
    RoundStats,
)
from eesd_dist.workers.roles import LoadLike, StepLike

_ROUNDS_KEPT = 2048
_FIRST_TOKENS_KEPT = 1024


class _Watched:
    """Times of one live request at the drafting actor."""

    def __init__(self, request: Request) -> None:
        self._is_resumed = bool(request.generated)
        self._num_prompt_tokens = 0 if self._is_resumed else len(request.prompt)
        self._arrived_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._arrived_s
        self._queue_s = 0.0
        self._inter_token_s: list[float] = []

    def saw(self, emission: Emission) -> float | None:
        """Returns the time to the first token with the first token, otherwise None."""
        time_s = time.monotonic()
        if emission.queue_s is not None:
            self._queue_s = emission.queue_s
        if not emission.tokens:
            return None
        last_s, self._last_s = self._last_s, time_s
        if self._first_s is None:
            self._first_s = time_s
            return self._first_token_s
        self._inter_token_s.append((time_s - last_s) / len(emission.tokens))
        return None

    @property
    def _first_token_s(self) -> float | None:
        """None of a resumed request, and before the first token."""
        if self._first_s is None or self._is_resumed:
            return None
        return self._first_s - self._arrived_s

    def timings(self, reason: FinishReason | None) -> RequestTimings:
        is_whole = reason is not None and not self._is_resumed
        return RequestTimings(
            num_prompt_tokens=self._num_prompt_tokens,
            finish_reason=reason,
            queue_s=self._queue_s,
            e2e_s=time.monotonic() - self._arrived_s if is_whole else None,
            time_to_first_token_s=self._first_token_s,
            inter_token_s=tuple(self._inter_token_s),
        )


class DraftWatch:
    """Turns round statistics into metrics and spans, in the drafting actor's event loop."""

    def __init__(self, tracing: Tracing, *, model_name: str) -> None:
        self._metrics = ServiceMetrics(model_name=model_name)
        self._tracing = tracing
        self._spans = tracing.rounds
        self._starts = None if self._spans is None else StartSpans(self._spans)
        self._rounds: deque[RoundStats] = deque(maxlen=_ROUNDS_KEPT)
        self._recent = RecentRounds()
        self._requests: dict[RequestId, _Watched] = {}
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_FIRST_TOKENS_KEPT)
        """Times when the latest first tokens left, and how long after the arrival of their
        requests."""

    def arrived(self, request: Request) -> None:
        self._requests[request.request_id] = _Watched(request)
        if self._starts is not None:
            self._starts.arrived(request)

    def saw(self, result: StepLike, *, stale_ids: Collection[RequestId] = ()) -> None:
        """Records a step. `stale_ids`: requests with emissions of an earlier submission."""
        for stats in result.rounds:
            self._rounds.append(stats)
            self._recent.add(stats)
            self._metrics.observe_round(stats)
            if self._spans is not None:
                self._spans.record_round(stats)
            if self._starts is not None:
                self._starts.record(stats, result.emissions, resubmitted=stale_ids)
        for emission in result.emissions:
            watched = self._requests.get(emission.request_id)
            if watched is None or emission.request_id in stale_ids:
                continue
            if (first_s := watched.saw(emission)) is not None:
                self._first_tokens.append((time.monotonic(), first_s))
            if emission.finish_reason is not None:
                self._ended(emission.request_id, emission.finish_reason)

    def left(self, request_id: RequestId) -> None:
        """Records that the request's reader has left, or that it has failed."""
        self._ended(request_id, FinishReason.ABORT)

    def sent_on(self, request_id: RequestId) -> None:
        """Records that the request will be resumed, in this or another pipeline."""
        self._ended(request_id, None)

    def page(
        self,
        load: LoadLike | None,
        *,
        recorder: RecorderCounts | None = None,
        num_refusals: int = 0,
    ) -> bytes:
        """Returns the page that a Prometheus server scrapes."""
        if load is not None:
            self._metrics.observe_load(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                kv_usage=_kv_use(load),
            )
            self._metrics.observe_totals(
                num_preemptions=load.num_preemptions,
                num_prompt_tokens=load.num_prompt_tokens,
                num_cached_tokens=load.num_cached_prompt_tokens,
            )
        if recorder is not None:
            self._metrics.observe_recorder(recorder)
        self._metrics.observe_refused(num_refusals)
        return self._metrics.render()

    def activity(self, load: LoadLike) -> Activity:
        """Returns what the engine did in the last seconds."""
        oldest_s = time.monotonic() - FIRST_TOKEN_WINDOW_S
        while self._first_tokens and self._first_tokens[0][0] < oldest_s:
            self._first_tokens.popleft()
        return self._recent.activity(
            time_unix_s=time.time(),
            num_waiting=load.num_waiting,
            kv_use=_kv_use(load),
            first_tokens_s=[first_s for _, first_s in self._first_tokens],
        )

    def rounds(self) -> Sequence[RoundStats]:
        return tuple(self._rounds)

    def acceptance(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns, by draft position, how many of the latest drafts reached it and how many of
        those were accepted there."""
        rounds = self.rounds()
        return (
            _summed([stats.drafted_by_position for stats in rounds]),
            _summed([stats.accepted_by_position for stats in rounds]),
        )

    def kept_spans(self, trace_ids: Collection[str]) -> tuple[SpanRecord, ...]:
        return self._tracing.spans(trace_ids)

    def flush(self) -> None:
        self._tracing.flush()

    def _ended(self, request_id: RequestId, reason: FinishReason | None) -> None:
        if self._starts is not None:
            self._starts.left(request_id)
        watched = self._requests.pop(request_id, None)
        if watched is not None:
            self._metrics.observe_request(watched.timings(reason))


def _kv_use(load: LoadLike) -> float:
    return 1.0 - load.free_pages / load.num_pages if load.num_pages else 0.0


def _summed(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))
