"""Traces: joined by parent ids over files and HTTP, and without any cost when off."""

import random
import re
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import (
    context_of,
    request_span,
    response_attributes,
    route_span,
    traceparent_of,
)
from eesd_dist.telemetry.round_spans import RoundSpans
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.types import SamplingParams
from tests.support.spans import WrittenSpan, read_spans
from tests.unit.telemetry.rounds import a_round

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = [f"eesd.{stage}" for stage in names.STAGES]


@contextmanager
def traced(process: str, folder: Path) -> Iterator[Tracing]:
    tracing = make_tracing(process=process, folder=folder)
    try:
        yield tracing
    finally:
        tracing.close()


def rounds_of(tracing: Tracing) -> RoundSpans:
    assert tracing.rounds is not None
    return tracing.rounds


def one(spans: list[WrittenSpan], name: str) -> WrittenSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


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
            trace_id, span_id = rounds_of(draft).ids([None, parent])
            rounds_of(rank).record_rank(
                trace_id=trace_id,
                span_id=span_id,
                rank=0,
                num_rows=9,
                started_unix_s=1_700_000_000.014,
                seconds=0.019,
            )
            rounds_of(draft).record_round(
                a_round(traceparents=(None, parent), trace_id=trace_id, span_id=span_id)
            )
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
    for earlier, later in pairwise(stages):
        assert later.start_us == pytest.approx(earlier.end_us, abs=1)
    assert stages[-1].end_us == pytest.approx(whole.end_us, abs=1)
    assert whole.end_us - whole.start_us == pytest.approx(34_000, abs=1)


def test_spans_say_what_happened(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    spans = read_spans(tmp_path)
    whole, request = one(spans, "eesd.round").attributes, one(spans, "chat demo").attributes
    assert whole["eesd.draft.tokens"] == 7
    assert whole["eesd.accepted.tokens"] == 4
    assert one(spans, "eesd.transfer").attributes["eesd.transfer.bytes"] == 4096
    assert one(spans, "eesd.transfer").attributes["eesd.transfer.reply_bytes"] == 1024
    assert one(spans, "eesd.verify").attributes["eesd.verify.collective_seconds"] == 0.004
    assert one(spans, "eesd.verify").attributes["eesd.verify.collective_sent_bytes"] == 300
    assert request["gen_ai.operation.name"] == "chat"
    assert request["gen_ai.request.temperature"] == 0.5
    assert request["gen_ai.request.seed"] == -1  # the same 64 bits, signed
    assert one(spans, "eesd.route").attributes == {"eesd.request.id": "a", "eesd.pipeline": "p0"}
    assert one(spans, "eesd.verify.rank").attributes == {"eesd.rank": 0, "eesd.round.rows": 9}
    assert request["gen_ai.response.finish_reasons"] == ["stop"]
    assert request["gen_ai.usage.output_tokens"] == 6


def test_every_request_of_a_round_sees_it_in_its_own_trace(tmp_path: Path) -> None:
    with traced("draft", tmp_path) as tracing:
        requests = [tracing.tracer.start_span(f"request {i}") for i in range(3)]
        parents = (None, *(traceparent_of(request) for request in requests))
        rounds_of(tracing).record_round(a_round(traceparents=parents))
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
        assert rounds_of(tracing).ids([silent, None]) == (0, 0)
        rounds_of(tracing).record_round(a_round(traceparents=(silent, None)))
        rounds_of(tracing).record_rank(
            trace_id=0, span_id=0, rank=0, num_rows=9, started_unix_s=1.0, seconds=1.0
        )
        tracing.tracer.start_span("request", context_of(silent)).end()
    assert read_spans(tmp_path) == []


@pytest.mark.parametrize("nonsense", ["nonsense", "a-b-c-1", f"00-{'0' * 32}-{'0' * 16}-01", ""])
def test_an_invalid_traceparent_starts_a_new_trace(tmp_path: Path, nonsense: str) -> None:
    with traced("ingress", tmp_path) as tracing:
        tracing.tracer.start_span("request", context_of(nonsense)).end()
        assert rounds_of(tracing).ids([nonsense]) == (0, 0)
        rounds_of(tracing).record_round(a_round(traceparents=(nonsense,)))
    (span,) = read_spans(tmp_path)
    assert span.parent_id is None


def test_a_failed_request_says_how(tmp_path: Path) -> None:
    with traced("ingress", tmp_path) as tracing, pytest.raises(ValueError, match="too hot"):  # noqa: SIM117
        with route_span(tracing.tracer, traceparent=None, request_id="a"):
            raise ValueError("too hot")
    (span,) = read_spans(tmp_path)
    assert span.attributes["error.type"] == "ValueError"
    assert span.status == {"code": 2, "message": "ValueError: too hot"}


def test_a_process_that_is_killed_after_a_flush_leaves_all_its_spans(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from eesd_dist.telemetry.tracing import make_tracing\n"
        "tracing = make_tracing(process='draft', folder=Path(sys.argv[1]))\n"
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
        "tracing = make_tracing(process='x')\n"
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
    one_, other = read_spans(tmp_path)
    assert one_.trace_id != other.trace_id
    assert one_.span_id != other.span_id


class _Collector(BaseHTTPRequestHandler):
    """A minimal OTLP/HTTP collector."""

    seen: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).seen.append((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


def test_with_an_endpoint_spans_go_there() -> None:
    _Collector.seen = []
    server = HTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    tracing = make_tracing(process="x", endpoint=f"http://127.0.0.1:{server.server_port}")
    rounds_of(tracing).record_round(a_round(traceparents=(CLIENT,)))
    tracing.flush()
    tracing.close()
    server.shutdown()
    server.server_close()
    thread.join()
    ((path, body),) = _Collector.seen
    assert path == "/v1/traces"
    assert bytes.fromhex(CLIENT.split("-")[1]) in body
    assert b"eesd.verify" in body


def test_a_line_of_a_file_is_a_request_that_a_collector_takes(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    lines = (tmp_path / "draft.jsonl").read_text().splitlines()
    for line in lines:
        in_base64 = re.sub(
            r'"(\w+Id)":"([0-9a-f]+)"',
            lambda found: f'"{found[1]}":"{b64encode(bytes.fromhex(found[2])).decode()}"',
            line,
        )
        request = json_format.Parse(in_base64, ExportTraceServiceRequest())
        (scope,) = request.resource_spans[0].scope_spans
        assert {span.trace_id.hex() for span in scope.spans} == {CLIENT.split("-")[1]}
    assert lines
