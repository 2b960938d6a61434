"""Prometheus metrics of one process, fed from the statistics that rounds and requests return.

Names are vLLM's with the prefix `eesd_`, so that dashboards can be ported by search and replace.
Nothing is measured here. Acceptance rate in PromQL:

    rate(eesd_spec_decode_num_accepted_tokens_total[5m]) /
    rate(eesd_spec_decode_num_draft_tokens_total[5m])

A hop's bytes are those that rank 0 of its group sent and received. Between the stages they are
counted at the draft stage. A hop's seconds are time spent waiting. `draft_to_verify` includes the
way back, since the two directions cannot be separated without a common clock.

Generated tokens are counted from rounds, prompt tokens from requests, so that each is counted once
whether one process observes both or two processes observe one each.
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from eesd_dist.telemetry.names import (
    HOP_DRAFT_GROUP,
    HOP_DRAFT_TO_VERIFY,
    HOP_VERIFY_GROUP,
    HOP_VERIFY_TO_DRAFT,
    HOPS,
    STAGES,
)
from eesd_dist.types import FinishReason, RecorderCounts, RoundStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
REQUEST_S = tuple(0.01 * 2**i for i in range(14))
_STAGE_S = tuple(0.0001 * 2**i for i in range(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Timings of one request in this process, which may have served only part of it."""

    num_prompt_tokens: int
    """0 for a resumed request: the process that served it first has counted them."""
    finish_reason: FinishReason | None
    """None: it was evicted to be resumed later or in another pipeline."""
    queue_s: float
    e2e_s: float | None
    """None where it did not both begin and end here."""
    time_to_first_token_s: float | None = None
    """None when it ended before its first token, or was resumed here."""
    inter_token_s: tuple[float, ...] = ()
    """Time between two emissions, divided by the tokens of the second."""


class ServiceMetrics:
    """Metrics in a separate registry, so that two services in one process do not mix."""

    def __init__(self, *, model_name: str) -> None:
        self._page = _Page(model_name)
        self.registry = self._page.registry
        self._running = self._page.gauge("num_requests_running", "Requests that hold KV pages.")
        self._waiting = self._page.gauge("num_requests_waiting", "Requests in the queue.")
        self._kv_usage = self._page.gauge(
            "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1."
        )
        self._preemptions = _Total(
            self._page.counter(
                "num_preemptions", "Times that a request had to give up its KV pages."
            )
        )
        self._prefix_queries = _Total(
            self._page.counter("prefix_cache_queries", "Prompt tokens of requests that have begun.")
        )
        self._prefix_hits = _Total(
            self._page.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        )
        self._requests = _RequestMetrics(self._page)
        self._rounds = _RoundMetrics(self._page)
        self._refused = _Total(
            self._page.counter(
                "refused_connections",
                "Connections to the drafting actor from outside its pipeline.",
            )
        )
        self._recorder: _RecorderMetrics | None = None
        """None where there is no recorder."""

    def observe_load(self, *, num_running: int, num_waiting: int, kv_usage: float) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._kv_usage.set(kv_usage)

    def observe_round(self, stats: RoundStats) -> None:
        self._rounds.observe(stats)

    def observe_request(self, timings: RequestTimings) -> None:
        self._requests.observe(timings)

    def observe_recorder(self, counts: RecorderCounts) -> None:
        """Takes totals since the process began; the first call creates the metrics."""
        if self._recorder is None:
            self._recorder = _RecorderMetrics(self._page)
        self._recorder.observe(counts)

    def observe_refused(self, total: int) -> None:
        """Takes the total since the process began."""
        self._refused.reached(total)

    def observe_totals(
        self, *, num_preemptions: int, num_prompt_tokens: int, num_cached_tokens: int
    ) -> None:
        """Takes totals since the engine was built."""
        self._preemptions.reached(num_preemptions)
        self._prefix_queries.reached(num_prompt_tokens)
        self._prefix_hits.reached(num_cached_tokens)

    def render(self) -> bytes:
        """Returns the page that a Prometheus server scrapes, of type CONTENT_TYPE."""
        return generate_latest(self.registry)


class _Page:
    """Registers metrics of one model in one registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name

    def gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"eesd_{name}", text, ("model_name",), registry=self.registry)
        return gauge.labels(self.model_name)

    def counter(self, name: str, text: str) -> Counter:
        return self.labelled_counter(name, text).labels(self.model_name)

    def labelled_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"eesd_{name}", text, ("model_name", *labels), registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self.labelled_histogram(name, text, buckets).labels(self.model_name)

    def labelled_histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"eesd_{name}", text, ("model_name", *labels), buckets=buckets, registry=self.registry
        )


class _RequestMetrics:
    """Metrics of requests that ended."""

    def __init__(self, page: _Page) -> None:
        self._model_name = page.model_name
        self._prompt_tokens = page.counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._finished = page.labelled_counter(
            "request_success",
            "Finished requests. One that a stop string ended is an abort here.",
            "finished_reason",
        )
        self._first_token = page.histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S
        )
        self._inter_token = page.histogram(
            "inter_token_latency_seconds", "Between tokens of one request.", _INTER_TOKEN_S
        )
        self._e2e = page.histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_S
        )
        self._queue = page.histogram(
            "request_queue_time_seconds", "Arrival to first round.", REQUEST_S
        )
        # A rate needs a first sample at zero to show the first event.
        for reason in FinishReason:
            self._finished.labels(self._model_name, reason.value)

    def observe(self, timings: RequestTimings) -> None:
        self._prompt_tokens.inc(timings.num_prompt_tokens)
        if timings.finish_reason is not None:
            self._finished.labels(self._model_name, timings.finish_reason.value).inc()
        self._queue.observe(timings.queue_s)
        if timings.e2e_s is not None:
            self._e2e.observe(timings.e2e_s)
        if timings.time_to_first_token_s is not None:
            self._first_token.observe(timings.time_to_first_token_s)
        for seconds in timings.inter_token_s:
            self._inter_token.observe(seconds)


class _RoundMetrics:
    """Metrics of rounds: tokens and drafts, the seconds of each stage, and the hops."""

    def __init__(self, page: _Page) -> None:
        self._model_name = page.model_name
        self._generated_tokens = page.counter("generation_tokens", "Tokens that left.")
        self._drafts = page.counter("spec_decode_num_drafts", "Drafts verified.")
        self._drafted = page.counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = page.counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._looked_up = page.counter(
            "spec_decode_num_lookup_draft_tokens", "Tokens drafted by prompt lookup."
        )
        self._looked_up_accepted = page.counter(
            "spec_decode_num_lookup_accepted_tokens", "Of prompt lookup, accepted."
        )
        self._requests_of = page.labelled_counter(
            "spec_decode_num_requests_by_drafter",
            "Requests of rounds with drafts, by what drafted and why not in one call.",
            "drafter",
            "reason",
        )
        self._drafted_at = page.labelled_counter(
            "spec_decode_num_draft_tokens_per_pos", "Drafted, by draft position.", "position"
        )
        self._accepted_at = page.labelled_counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted, by draft position.", "position"
        )
        self._stage = page.labelled_histogram(
            "round_stage_seconds", "Where the time of a round went.", _STAGE_S, "stage"
        )
        self._hop_bytes = page.labelled_counter(
            "hop_bytes", "Bytes between ranks.", "hop", "direction"
        )
        self._hop_seconds = page.labelled_counter(
            "hop_seconds",
            "Waiting for bytes between ranks; draft_to_verify: there and back.",
            "hop",
        )
        self._begin_at_zero()

    def observe(self, stats: RoundStats) -> None:
        self._generated_tokens.inc(stats.num_emitted)
        self._drafts.inc(_num_drafts(stats))
        self._drafted.inc(stats.num_drafted)
        self._accepted.inc(stats.num_accepted)
        self._looked_up.inc(stats.num_lookup_drafted)
        self._looked_up_accepted.inc(stats.num_lookup_accepted)
        for use, count in stats.drafters:
            self._requests_of.labels(self._model_name, use.drafter, use.reason).inc(count)
        for position, count in enumerate(stats.drafted_by_position):
            self._drafted_at.labels(self._model_name, str(position)).inc(count)
        for position, count in enumerate(stats.accepted_by_position):
            self._accepted_at.labels(self._model_name, str(position)).inc(count)
        for stage in STAGES:
            seconds: float = getattr(stats, f"{stage}_s")
            self._stage.labels(self._model_name, stage).observe(seconds)
        self._observe_hops(stats)

    def _observe_hops(self, stats: RoundStats) -> None:
        verify, draft = stats.verify_group, stats.draft_group
        for hop, direction, size in (
            (HOP_DRAFT_TO_VERIFY, "sent", stats.sent_bytes),
            (HOP_VERIFY_TO_DRAFT, "received", stats.received_bytes),
            (HOP_VERIFY_GROUP, "sent", verify.sent_bytes),
            (HOP_VERIFY_GROUP, "received", verify.received_bytes),
            (HOP_DRAFT_GROUP, "sent", draft.sent_bytes),
            (HOP_DRAFT_GROUP, "received", draft.received_bytes),
        ):
            self._hop_bytes.labels(self._model_name, hop, direction).inc(size)
        for hop, seconds in (
            (HOP_DRAFT_TO_VERIFY, stats.transfer_s),
            (HOP_VERIFY_GROUP, verify.wait_s),
            (HOP_DRAFT_GROUP, draft.wait_s),
        ):
            self._hop_seconds.labels(self._model_name, hop).inc(seconds)

    def _begin_at_zero(self) -> None:
        """Creates all label values: a rate needs a first sample at zero to show the first event."""
        for stage in STAGES:
            self._stage.labels(self._model_name, stage)
        for hop in HOPS:
            if hop != HOP_VERIFY_TO_DRAFT:
                self._hop_bytes.labels(self._model_name, hop, "sent")
                self._hop_seconds.labels(self._model_name, hop)
            if hop != HOP_DRAFT_TO_VERIFY:
                self._hop_bytes.labels(self._model_name, hop, "received")


class _RecorderMetrics:
    """Metrics of the recorder, from its totals since the process began."""

    def __init__(self, page: _Page) -> None:
        self._written = page.counter("recorder_sequences", "Texts kept for training.")
        self._dropped = page.counter("recorder_dropped", "Texts the recorder had no room for.")
        self._bytes = page.gauge("recorder_bytes", "Bytes of the recorder's shards.")
        self._last = RecorderCounts(num_written=0, num_dropped=0, num_bytes=0)

    def observe(self, counts: RecorderCounts) -> None:
        self._written.inc(counts.num_written - self._last.num_written)
        self._dropped.inc(counts.num_dropped - self._last.num_dropped)
        self._bytes.set(counts.num_bytes)
        self._last = counts


class _Total:
    """A counter that is told totals, which begin again when an engine is built again."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0

    def reached(self, total: int) -> None:
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total


def _num_drafts(stats: RoundStats) -> int:
    """Returns how many requests drafted in this round: those that drafted position 0."""
    return stats.drafted_by_position[0] if stats.drafted_by_position else 0
