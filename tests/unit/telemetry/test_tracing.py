"""Traces: joined by parent ids over files and over HTTP, and nothing at all when off."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from eesd_dist.errors import CheckpointError
from eesd_dist.telemetry import names
from eesd_dist.telemetry.merge_traces import TraceSpan, merge_traces, read_spans
from eesd_dist.telemetry.tracing import (
    NO_IDS,
    Tracing,
    make_tracing,
    open_request_span,
    open_route_span,
    response_attributes,
)
from eesd_dist.types import SamplingParams
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


def spans_of(folder: Path) -> list[TraceSpan]:
    return read_spans(sorted(folder.glob("*.jsonl")))


def one(spans: list[TraceSpan], name: str) -> TraceSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def serve_one_request(folder: Path) -> None:
    """HTTP request, route, one round, one verify rank: four roles in three processes' files."""
    with (
        traced("ingress", folder) as ingress,
        traced("draft", folder) as draft,
        traced("verify-0", folder) as rank,
    ):
        request = open_request_span(
            ingress,
            operation="chat",
            model="demo",
            traceparent=CLIENT,
            sampling=SamplingParams(temperature=0.5, max_tokens=20),
        )
        with (
            request,
            open_route_span(
                ingress, traceparent=request.traceparent, request_id="a", pipeline="p0"
            ),
        ):
            ids = draft.round_ids([request.traceparent])
            rank.record_rank(
                ids, rank=0, num_rows=9, started_unix_s=1_700_000_000.014, seconds=0.019
            )
            draft.record_round(
                a_round(traceparents=(request.traceparent,)),
                ids=ids,
                attributes={names.EXIT_LAYER: 4},
            )
            request.set(
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
    spans = spans_of(tmp_path)
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
    spans = spans_of(tmp_path)
    stages = [one(spans, stage) for stage in STAGES]
    whole = one(spans, "eesd.round")
    assert stages[0].start_us == whole.start_us
    for earlier, later in pairwise(stages):
        assert later.start_us == pytest.approx(earlier.end_us, abs=1)
    assert stages[-1].end_us == pytest.approx(whole.end_us, abs=1)
    assert whole.end_us - whole.start_us == pytest.approx(34_000, abs=1)


def test_spans_say_what_happened(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    spans = spans_of(tmp_path)
    whole, request = one(spans, "eesd.round").attributes, one(spans, "chat demo").attributes
    assert whole["eesd.draft.tokens"] == 7
    assert whole["eesd.accepted.tokens"] == 4
    assert whole["eesd.exit_layer"] == 4
    assert one(spans, "eesd.transfer").attributes["eesd.transfer.bytes"] == 4096
    assert one(spans, "eesd.transfer").attributes["eesd.transfer.reply_bytes"] == 1024
    assert one(spans, "eesd.verify").attributes["eesd.verify.collective_seconds"] == 0.004
    assert one(spans, "eesd.verify").attributes["eesd.verify.collective_sent_bytes"] == 300
    assert request["gen_ai.operation.name"] == "chat"
    assert request["gen_ai.request.temperature"] == 0.5
    assert request["gen_ai.response.finish_reasons"] == ["stop"]
    assert request["gen_ai.usage.output_tokens"] == 6


def test_every_request_of_a_round_sees_it_in_its_own_trace(tmp_path: Path) -> None:
    with traced("draft", tmp_path) as tracing:
        requests = [tracing.open_span(f"request {i}") for i in range(3)]
        parents = (None, *(request.traceparent for request in requests))
        tracing.record_round(a_round(traceparents=parents))
        for request in requests:
            request.end()
    spans = spans_of(tmp_path)
    rounds = [span for span in spans if span.name == "eesd.round"]
    assert len({span.trace_id for span in rounds}) == 3
    by_id = {span.span_id: span for span in spans}
    assert sorted(by_id[span.parent_id or ""].name for span in rounds) == [
        "request 0",
        "request 1",
        "request 2",
    ]
    assert one(spans, "eesd.draft").trace_id == one(spans, "request 0").trace_id
    lines = [json.loads(line) for line in (tmp_path / "draft.jsonl").read_text().splitlines()]
    written = [s for line in lines for s in line["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    links = [s["links"] for s in written if s["name"] == "eesd.round"]
    first = one(spans, "eesd.draft").parent_id
    assert sorted(len(link) for link in links) == [0, 1, 1]
    assert {link["spanId"] for found in links for link in found} == {first}


def test_a_request_that_is_not_sampled_leaves_nothing(tmp_path: Path) -> None:
    with traced("draft", tmp_path) as tracing:
        silent = CLIENT[:-1] + "0"
        assert tracing.round_ids([silent, None]) == NO_IDS
        tracing.record_round(a_round(traceparents=(silent, None)))
        tracing.open_span("request", traceparent=silent).end()
    assert spans_of(tmp_path) == []


@pytest.mark.parametrize("nonsense", ["nonsense", "a-b-c-1", f"00-{'0' * 32}-{'0' * 16}-01", ""])
def test_a_traceparent_nobody_can_read_starts_a_trace_of_its_own(
    tmp_path: Path, nonsense: str
) -> None:
    with traced("ingress", tmp_path) as tracing:
        tracing.open_span("request", traceparent=nonsense).end()
        assert tracing.round_ids([nonsense]) == NO_IDS
        tracing.record_round(a_round(traceparents=(nonsense,)))
    (span,) = spans_of(tmp_path)
    assert span.parent_id is None


def test_a_failed_request_says_how(tmp_path: Path) -> None:
    with traced("ingress", tmp_path) as tracing, pytest.raises(ValueError, match="too hot"):  # noqa: SIM117
        with tracing.open_span("request"):
            raise ValueError("too hot")
    (span,) = spans_of(tmp_path)
    assert span.attributes["error.type"] == "ValueError"
    assert '"code":2' in (tmp_path / "ingress.jsonl").read_text()


def test_flush_writes_what_is_waiting(tmp_path: Path) -> None:
    with traced("draft", tmp_path) as tracing:
        tracing.open_span("request").end()
        tracing.flush()
        assert len(spans_of(tmp_path)) == 1


def test_off_it_knows_no_sdk_and_hands_the_context_on() -> None:
    program = (
        "import sys\n"
        "from eesd_dist.telemetry.tracing import make_tracing, open_request_span\n"
        "tracing = make_tracing(process='x')\n"
        f"span = open_request_span(tracing, operation='chat', model='m', traceparent={CLIENT!r})\n"
        f"assert span.traceparent == {CLIENT!r}\n"
        "assert not tracing.round_ids([span.traceparent]) and not tracing.is_on\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class _Collector(BaseHTTPRequestHandler):
    """Twenty lines of an OTLP/HTTP collector."""

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
    tracing.record_round(a_round(traceparents=(CLIENT,)))
    tracing.flush()
    tracing.close()
    server.shutdown()
    server.server_close()
    thread.join()
    ((path, body),) = _Collector.seen
    assert path == "/v1/traces"
    assert bytes.fromhex(CLIENT.split("-")[1]) in body
    assert b"eesd.verify" in body


def test_files_of_many_processes_become_one_picture(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    target = tmp_path / "trace.json"
    assert merge_traces(tmp_path, target) == len(spans_of(tmp_path)) == 9
    events = json.loads(target.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"ingress", "draft", "verify-0"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 9
    assert all(e["dur"] >= 0 for e in complete)
    starts, ends = ([e for e in events if e["ph"] == kind] for kind in "sf")
    assert len(starts) == len(ends) == 2  # into the draft stage, and on to the verify rank
    assert {e["id"] for e in starts} == {e["id"] for e in ends}


def test_a_line_cut_short_by_a_killed_process_is_left_out(tmp_path: Path) -> None:
    serve_one_request(tmp_path)
    whole = len(spans_of(tmp_path))
    with (tmp_path / "draft.jsonl").open("a") as stream:
        stream.write('{"resourceSpans":[{"resou')
    assert len(spans_of(tmp_path)) == whole


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("hello\n")
    with pytest.raises(CheckpointError, match=r"other\.jsonl"):
        spans_of(tmp_path)
