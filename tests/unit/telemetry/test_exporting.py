"""Where spans go: over HTTP and gRPC to a receiver, and into the memory of the process; and which
requests are sampled."""

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from opentelemetry.trace import SpanKind

from eesd_dist.telemetry import names
from eesd_dist.telemetry.provider import FewRequests
from eesd_dist.telemetry.request_spans import context_of, server_span, traceparent_of
from eesd_dist.telemetry.round_spans import RoundSpans
from eesd_dist.telemetry.span_records import traces_of
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.telemetry.tracing_options import TracingOptions
from tests.support.otlp_receivers import receiving
from tests.unit.telemetry.rounds import a_round

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def rounds_of(tracing: Tracing) -> RoundSpans:
    assert tracing.rounds is not None
    return tracing.rounds


@pytest.fixture
def local_tracing() -> Iterator[Tracing]:
    tracing = make_tracing(TracingOptions(max_traces_kept=3), process="x")
    yield tracing
    tracing.close()


def ask(tracing: Tracing, request_id: str, *, traceparent: str | None = None) -> str | None:
    """Makes the span of a request, with a child; returns the child's traceparent."""
    span = server_span(
        tracing.tracer,
        "POST /v1/completions",
        parent=context_of(traceparent),
        attributes={names.HTTP_METHOD: "POST", names.REQUEST_ID: request_id},
    )
    tracing.tracer.start_span("inner", context_of(traceparent_of(span))).end()
    span.end()
    return traceparent_of(span)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_spans_arrive_over(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment names a proxy, which is for other hosts."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    for name in ("http_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with receiving(protocol) as receiver:
        options = TracingOptions(endpoint=receiver.endpoint, protocol=protocol)  # type: ignore[arg-type]
        tracing = make_tracing(options, process="x")
        trace = rounds_of(tracing).trace_round([CLIENT])
        rounds_of(tracing).record_round(a_round(trace=trace))
        tracing.flush()
        spans = receiver.spans
        tracing.close()
    whole = next(span for span in spans if span.name == names.SPAN_ROUND)
    assert (whole.trace_id, whole.parent_id) == (CLIENT.split("-")[1], CLIENT.split("-")[2])
    assert whole.process == "x"
    assert whole.attributes[names.DRAFT_TOKENS] == 7
    assert {span.name for span in spans if span.parent_id == whole.span_id} == {
        names.SPAN_PLAN,
        names.SPAN_DRAFT,
        names.SPAN_VERIFY,
        names.SPAN_COMMIT,
    }


@pytest.mark.parametrize(
    ("sampler", "arg", "parent", "lower", "upper"),
    [
        (None, None, None, 400, 400),
        ("always_off", None, None, 0, 0),
        ("parentbased_always_off", None, CLIENT, 400, 400),
        ("parentbased_always_on", None, CLIENT[:-1] + "0", 0, 0),
        ("traceidratio", "0.25", None, 60, 140),
        ("parentbased_traceidratio", "0.0", None, 0, 0),
    ],
)
def test_the_sampler_is_that_of_the_environment(
    sampler: str | None,
    arg: str | None,
    parent: str | None,
    lower: int,
    upper: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", arg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with receiving("http/protobuf") as receiver:
        tracing = make_tracing(TracingOptions(endpoint=receiver.endpoint), process="x")
        for _ in range(400):
            tracing.tracer.start_span("request", context_of(parent)).end()
        tracing.flush()
        tracing.close()
        assert lower <= len(receiver.spans) <= upper


def test_the_sampler_of_the_configuration_overrides_that_of_the_environment() -> None:
    program = (
        "import os; os.environ['OTEL_TRACES_SAMPLER'] = 'always_on'\n"
        "from eesd_dist.telemetry.tracing import make_tracing\n"
        "from eesd_dist.telemetry.tracing_options import TracingOptions\n"
        "options = TracingOptions(sampler='traceidratio', sampler_arg='0', max_traces_kept=9)\n"
        "tracing = make_tracing(options, process='x')\n"
        "tracing.tracer.start_span('request').end()\n"
        "assert tracing.spans() == ()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_an_exporter_a_busy_service_samples_one_request_in_a_second() -> None:
    time_s = 100.0
    few = FewRequests(per_s=1.0, burst=4, clock=lambda: time_s)

    def sampled(number: int, kind: SpanKind = SpanKind.SERVER) -> int:
        decisions = [few.should_sample(None, 1, "request", kind).decision for _ in range(number)]
        return sum(decision.is_sampled() for decision in decisions)

    assert sampled(100) == 4
    assert sampled(100, SpanKind.INTERNAL) == 100  # inside a request that is sampled
    time_s += 2.5
    assert sampled(100) == 2
    time_s += 1000.0
    assert sampled(100) == 4


def test_a_client_that_samples_everything_does_not_make_a_busy_service_do_so(
    local_tracing: Tracing,
) -> None:
    sampled = [ask(local_tracing, "a", traceparent=CLIENT) for _ in range(100)]
    assert (
        16
        <= sum(traceparent is not None and traceparent.endswith("1") for traceparent in sampled)
        < 40
    )


def test_the_latest_traces_are_kept_and_no_more(local_tracing: Tracing) -> None:
    for number in range(5):
        ask(local_tracing, f"r{number}")
    traces = traces_of(local_tracing.spans())
    assert [trace["request_id"] for trace in traces] == ["r4", "r3", "r2"]
    spans = traces[0]["spans"]
    assert isinstance(spans, list)
    assert [span["name"] for span in spans] == ["POST /v1/completions", "inner"]
    assert spans[1]["parent_id"] == spans[0]["span_id"]
    assert spans[0]["start"] <= spans[1]["start"] <= spans[1]["end"] <= spans[0]["end"]
    assert spans[0]["process"] == "x"


def test_requests_of_one_trace_are_apart_and_found_by_their_ids(local_tracing: Tracing) -> None:
    for request_id in ("a", "b"):
        ask(local_tracing, request_id, traceparent=CLIENT)
    assert len(traces_of(local_tracing.spans())) == 2
    (trace,) = traces_of(local_tracing.spans(), request_id="a")
    assert trace["request_id"] == "a"
    assert len(trace["spans"]) == 2  # type: ignore[arg-type]
    assert traces_of(local_tracing.spans(), request_id="c") == []


def test_only_the_spans_of_asked_traces_are_read(local_tracing: Tracing) -> None:
    first = ask(local_tracing, "a")
    ask(local_tracing, "b")
    assert first is not None
    spans = local_tracing.spans([first.split("-")[1], uuid.uuid4().hex])
    assert {span.trace_id for span in spans} == {first.split("-")[1]}


def test_a_long_request_keeps_a_bounded_number_of_spans_and_its_own(local_tracing: Tracing) -> None:
    span = server_span(
        local_tracing.tracer,
        "POST /",
        parent=context_of(None),
        attributes={names.HTTP_METHOD: "POST"},
    )
    for _ in range(1000):
        local_tracing.tracer.start_span("inner", context_of(traceparent_of(span))).end()
    span.end()
    assert 500 < len(local_tracing.spans()) < 600
    assert any(record.is_request for record in local_tracing.spans())


def test_a_request_has_spans_of_its_first_rounds_and_of_ever_fewer_later_ones() -> None:
    tracing = make_tracing(TracingOptions(max_traces_kept=1, max_round_spans=5), process="x")
    other = CLIENT.replace("0af", "1af")
    traced = [
        number
        for number in range(1, 101)
        if CLIENT in rounds_of(tracing).trace_round([CLIENT, CLIENT, None]).parents
    ]
    assert traced == [1, 2, 3, 4, 5, 8, 16, 32, 64]
    assert rounds_of(tracing).trace_round([CLIENT, other]).parents == (other,)
    tracing.close()
