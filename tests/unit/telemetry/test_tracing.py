"""Traces: joined by parent ids over files and HTTP, and without any cost when off."""

import random
import re
import subprocess
import sys
import time
from asyncio import CancelledError
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from eesd_dist.errors import ConfigError
from eesd_dist.telemetry import names
from eesd_dist.telemetry.provider import make_provider
from eesd_dist.telemetry.request_spans import (
    context_of,
    request_span,
    response_attributes,
    route_span,
    traceparent_of,
)
from eesd_dist.telemetry.round_spans import RoundSpans
from eesd_dist.telemetry.start_spans import StartSpans
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.telemetry.tracing_options import TracingOptions
from eesd_dist.types import NO_TRACE, Emission, Request, RequestId, SamplingParams, TokenId
from tests.support.spans import WrittenSpan, read_spans
from tests.unit.telemetry.rounds import a_round

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = [names.SPAN_PLAN, names.SPAN_DRAFT, names.SPAN_VERIFY, names.SPAN_COMMIT]


@contextmanager
def traced(process: str, folder: Path) -> Iterator[Tracing]:
    tracing = make_tracing(TracingOptions(folder=str(folder)), process=process)
    try:
        yield tracing
    finally:
        tracing.close()


def rounds_of(tracing: Tracing) -> RoundSpans:
    assert tracing.rounds is not None
    return tracing.rounds


def record(tracing: Tracing, *traceparents: str | None, **changes: Any) -> None:
    """Records a round of requests with these traceparents."""
    trace = rounds_of(tracing).trace_round(traceparents)
    rounds_of(tracing).record_round(a_round(trace=trace, **changes))


def one(spans: list[WrittenSpan], name: str) -> WrittenSpan:
    (span_,) = [span for span in spans if span.name == name]
    return span_


def serve_one_request(folder: Path) -> None:
    """Writes spans of an HTTP request, a route, one round and one verify rank, in three processes'
    files."""
    with (
        traced("ingress", folder) as ingress,
        traced("draft", folder) as draft,
        traced("verify-0", folder) as rank,
    ):
        span = request_span(
            ingress.tracer,
            operation="chat",
            model="demo",
            traceparent=CLIENT,
            sampling=SamplingParams(temperature=0.5, max_tokens=20, seed=2**64 - 1),
        )
        with span as request:
            parent = traceparent_of(request)
            with route_span(ingress.tracer, traceparent=parent, request_id="a") as route:
                route.set_attribute(names.PIPELINE, "p0")
            trace = rounds_of(draft).trace_round([None, parent])
            rounds_of(rank).record_rank(
                trace_id=trace.trace_id,
                span_id=trace.span_id,
                rank=0,
                num_rows=9,
                began_unix_s=1_700_000_000.014,
                ended_unix_s=1_700_000_000.033,
            )
            rounds_of(draft).record_round(a_round(trace=trace))
            request.set_attributes(
                response_attributes(
                    response_id="chatcmpl-1",
                    model="demo",
                    finish_reasons=["stop"],
                    num_input_tokens=3,
                    num_output_tokens=6,
                )
            )


def test_one_request_is_one_trace_from_http_to_verify_rank(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    spans = read_spans(tmp_path)
    assert {span.trace_id for span in spans} == {CLIENT.split("-")[1]}
    request, a_round_span = one(spans, "chat demo"), one(spans, "eesd.round")
    assert request.parent_id == CLIENT.split("-")[2]
    assert one(spans, "eesd.route").parent_id == request.span_id
    assert a_round_span.parent_id == request.span_id
    for stage in STAGES:
        assert one(spans, stage).parent_id == a_round_span.span_id
    assert one(spans, "eesd.verify.rank").parent_id == a_round_span.span_id
    assert {span.process for span in spans} == {"ingress", "draft", "verify-0"}


def test_stages_follow_one_another_and_fill_the_round(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    spans = read_spans(tmp_path)
    stages = [one(spans, stage) for stage in STAGES]
    whole = one(spans, "eesd.round")
    assert stages[0].start_us == whole.start_us
    for earlier, following in pairwise(stages):
        assert following.start_us == pytest.approx(earlier.end_us, abs=1)
    assert stages[-1].end_us == pytest.approx(whole.end_us, abs=1)
    assert whole.end_us - whole.start_us == pytest.approx(40_000, abs=1)
    # From sending to having the verdict, whatever the loop did in between.
    verify = one(spans, names.SPAN_VERIFY)
    assert verify.end_us - verify.start_us == pytest.approx(40_000 - 12_000, abs=1)


def test_spans_say_what_happened(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    spans = read_spans(tmp_path)
    whole, request = one(spans, "eesd.round").attributes, one(spans, "chat demo").attributes
    assert whole["eesd.draft.tokens"] == 7
    assert whole["eesd.accepted.tokens"] == 4
    assert one(spans, "eesd.verify").attributes["eesd.transfer.bytes"] == 4096
    assert one(spans, "eesd.verify").attributes["eesd.transfer.reply_bytes"] == 1024
    assert one(spans, "eesd.verify").attributes["eesd.transfer.seconds"] == 0.002
    assert one(spans, "eesd.verify").attributes["eesd.verify.seconds"] == 0.020
    assert one(spans, "eesd.verify").attributes["eesd.verify.collective_seconds"] == 0.004
    assert one(spans, "eesd.verify").attributes["eesd.verify.collective_sent_bytes"] == 300
    assert request["gen_ai.operation.name"] == "chat"
    assert request["gen_ai.request.temperature"] == 0.5
    assert request["gen_ai.request.seed"] == -1  # the same 64 bits, signed
    assert one(spans, "eesd.route").attributes == {
        "eesd.request.id": "a",
        "eesd.request.interruptions": 0,
        "eesd.pipeline": "p0",
    }
    assert one(spans, "eesd.verify.rank").attributes == {"eesd.rank": 0, "eesd.round.rows": 9}
    assert request["gen_ai.response.finish_reasons"] == ["stop"]
    assert request["gen_ai.usage.output_tokens"] == 6


def test_every_request_of_a_round_sees_it_in_its_own_trace(tmp_path: Path) -> None:
    with traced("draft", tmp_path) as tracing:
        requests = [tracing.tracer.start_span(f"request {i}") for i in range(3)]
        parents = (None, *(traceparent_of(request) for request in requests))
        record(tracing, *parents)
        for request in requests:
            request.end()
    spans = read_spans(tmp_path)
    rounds = [span for span in spans if span.name == "eesd.round"]
    assert len({span.trace_id for span in rounds}) == 3
    by_id = {span.span_id: span for span in spans}
    assert sorted(by_id[span.parent_id or ""].name for span in rounds) == [
        "request 0",
        "request 1",
        "request 2",
    ]
    assert one(spans, "eesd.draft").trace_id == one(spans, "request 0").trace_id
    first = one(spans, "eesd.draft").parent_id
    assert sorted(span.links for span in rounds) == [(), (first,), (first,)]


def test_a_request_that_is_not_sampled_leaves_nothing(tmp_path: Path) -> None:
    with traced("draft", tmp_path) as tracing:
        silent = CLIENT[:-1] + "0"
        assert rounds_of(tracing).trace_round([silent, None]) == NO_TRACE
        record(tracing, silent, None)
        tracing.tracer.start_span("request", context_of(silent)).end()
    assert read_spans(tmp_path) == []


@pytest.mark.parametrize(
    "nonsense", ["nonsense", "a-b-c-1", f"00-{'0' * 32}-{'0' * 16}-01", "", "1" * 55]
)
def test_an_invalid_traceparent_starts_a_new_trace(tmp_path: Path, nonsense: str) -> None:
    with traced("ingress", tmp_path) as tracing:
        tracing.tracer.start_span("request", context_of(nonsense)).end()
        assert rounds_of(tracing).trace_round([nonsense]) == NO_TRACE
    (span,) = read_spans(tmp_path)
    assert span.parent_id is None


def test_a_failed_request_says_how(tmp_path: Path) -> None:
    with traced("ingress", tmp_path) as tracing, pytest.raises(ValueError, match="too hot"):  # noqa: SIM117
        with route_span(tracing.tracer, traceparent=None, request_id="a"):
            raise ValueError("too hot")
    (span,) = read_spans(tmp_path)
    assert span.attributes["error.type"] == "ValueError"
    assert span.status == {"code": 2, "message": "ValueError: too hot"}


@pytest.mark.parametrize("departure", [GeneratorExit(), CancelledError()])
def test_a_client_that_leaves_is_no_error(tmp_path: Path, departure: BaseException) -> None:
    with traced("ingress", tmp_path) as tracing, pytest.raises(type(departure)):  # noqa: SIM117
        with route_span(tracing.tracer, traceparent=None, request_id="a"):
            raise departure
    (span,) = read_spans(tmp_path)
    assert span.status == {}
    assert "error.type" not in span.attributes
    assert span.attributes["eesd.request.client_left"] is True


def test_a_request_waits_and_is_prefilled_before_its_first_token(tmp_path: Path) -> None:
    request = Request(
        request_id=RequestId("a"),
        prompt=(TokenId(1),) * 3,
        sampling=SamplingParams(),
        traceparent=CLIENT,
    )
    with traced("draft", tmp_path) as tracing:
        starts = StartSpans(rounds_of(tracing))
        arrived_s = time.time()
        starts.arrived(request)
        starts.arrived(replace(request, request_id=RequestId("b"), traceparent=None))
        rounds = [
            a_round(started_unix_s=arrived_s + number, elapsed_s=0.5, round_id=number)
            for number in (1, 2, 3)
        ]
        first = Emission(request_id=request.request_id, tokens=(TokenId(5),), num_accepted=0)
        starts.record(rounds[0], ())  # a part of the prompt
        starts.record(rounds[1], (first,))
        starts.record(rounds[2], (first,))
    queue, prefill = read_spans(tmp_path)
    assert [queue.name, prefill.name] == ["eesd.queue", "eesd.prefill"]
    assert queue.parent_id == prefill.parent_id == CLIENT.split("-")[2]
    assert queue.end_us - queue.start_us == pytest.approx(1e6, abs=2e5)
    assert prefill.start_us == queue.end_us == pytest.approx(1e6 * (arrived_s + 1), abs=1)
    assert prefill.end_us == pytest.approx(1e6 * (arrived_s + 2.5), abs=1)
    assert prefill.attributes["eesd.request.tokens"] == 3


def test_a_process_that_is_killed_after_a_flush_leaves_all_its_spans(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from eesd_dist.telemetry.tracing import make_tracing\n"
        "from eesd_dist.telemetry.tracing_options import TracingOptions\n"
        "tracing = make_tracing(TracingOptions(folder=sys.argv[1]), process='draft')\n"
        "for number in range(3):\n"
        "    tracing.tracer.start_span(f'request {number}').end()\n"
        "tracing.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    died = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert died.returncode == -9
    assert len(read_spans(tmp_path)) == 3


def test_off_it_loads_no_sdk_has_no_rounds_and_hands_the_context_on() -> None:
    program = (
        "import sys\n"
        "from eesd_dist.telemetry.request_spans import route_span, traceparent_of\n"
        "from eesd_dist.telemetry.tracing import make_tracing\n"
        "from eesd_dist.telemetry.tracing_options import TracingOptions\n"
        "tracing = make_tracing(TracingOptions(), process='x')\n"
        "assert tracing.rounds is None\n"
        f"for given in ({CLIENT!r}, None):\n"
        "    with route_span(tracing.tracer, traceparent=given, request_id='a') as span:\n"
        "        assert traceparent_of(span) == given\n"
        "tracing.flush()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_seeding_random_alike_does_not_make_ids_alike(tmp_path: Path) -> None:
    for process in ("one", "other"):
        random.seed(7)
        with traced(process, tmp_path) as tracing:
            tracing.tracer.start_span("request").end()
    first, second = read_spans(tmp_path)
    assert first.trace_id != second.trace_id
    assert first.span_id != second.span_id


def test_a_line_of_a_file_is_a_request_that_a_collector_takes(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    lines = (tmp_path / "draft.jsonl").read_text().splitlines()
    for line in lines:
        in_base64 = re.sub(
            r'"(\w+Id)":"([0-9a-f]+)"',
            lambda match: f'"{match[1]}":"{b64encode(bytes.fromhex(match[2])).decode()}"',
            line,
        )
        request = json_format.Parse(in_base64, ExportTraceServiceRequest())
        (scope,) = request.resource_spans[0].scope_spans
        assert {span.trace_id.hex() for span in scope.spans} == {CLIENT.split("-")[1]}
    assert lines


def test_a_variable_that_the_sdk_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(ConfigError, match="OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
        make_provider(TracingOptions(max_traces_kept=1), process="p")
