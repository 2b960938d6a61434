"""One request, one trace: over all processes of a running service, to a receiver over HTTP and over
gRPC, and on the service's own pages."""

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from ray import serve

from eesd_dist.telemetry import names
from serve_app.app import build_app
from serve_app.cli.main import main
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.otlp_receivers import Receiver, receiving
from tests.support.running import Running, until
from tests.support.spans import WrittenSpan

BODY = {"prompt": "the quick brown fox", "max_tokens": 40, "seed": 7, "ignore_eos": True}
PROTOCOLS = {"traced-http": "http/protobuf", "traced-grpc": "grpc"}
_SLACK_US = 0.001
"""Times are nanoseconds, and here floats."""


@dataclass
class Traced:
    running: Running
    receiver: Receiver

    def ask(self, *, flags: str = "01", **fields: Any) -> tuple[dict[str, Any], str, str]:
        """Returns the answer, and the trace id and span id that the client has sent."""
        trace_id, span_id = f"{random.getrandbits(128):032x}", f"{random.getrandbits(64):016x}"
        answer = httpx.post(
            f"{self.running.url}/v1/completions",
            json=BODY | fields,
            headers={
                "traceparent": f"00-{trace_id}-{span_id}-{flags}",
                "x-request-id": f"r-{trace_id[:8]}",
            },
            timeout=100.0,
        )
        answer.raise_for_status()
        return answer.json(), trace_id, span_id

    def trace(self, trace_id: str, *, num_processes: int = 4) -> list[WrittenSpan]:
        """Waits until the spans of all processes have arrived."""

        def found() -> list[WrittenSpan] | None:
            spans = [span for span in self.receiver.spans if span.trace_id == trace_id]
            span_ids = {span.span_id for span in spans}
            is_whole = sum(span.parent_id not in span_ids for span in spans) == 1
            has_rounds = any(span.name == names.SPAN_VERIFY_RANK for span in spans)
            processes = {span.process for span in spans}
            round_counts = [
                s.attributes["eesd.rounds"] for s in spans if "eesd.rounds" in s.attributes
            ]
            emitted = [s for s in spans if s.attributes.get("eesd.emitted.tokens")]
            has_rounds = has_rounds and round_counts == [len(emitted)]
            is_complete = is_whole and has_rounds and len(processes) >= num_processes
            return spans if is_complete and not _missing(spans) else None

        return until(found) or []


@pytest.fixture(
    scope="module",
    params=["traced-http", pytest.param("traced-grpc", marks=pytest.mark.nightly)],
)
def traced(ray_port: int, tiny_service: Path, request: pytest.FixtureRequest) -> Iterator[Traced]:
    """A service with a receiver of its own, and two verify ranks."""
    name = request.param
    with receiving(PROTOCOLS[name]) as receiver:
        config = service_config(
            {
                "engine": {
                    "model": {"path": str(tiny_service), "dtype": "float32", "device": "cpu"},
                    "cache": {"num_pages": 256},
                    "parallel": {"verify_tensor_parallel_size": 2, "timeout_s": 20.0},
                },
                "model_name": "tiny",
                "app_name": name,
                "port": ray_port,
                "recovery": {"stream_pause_s": 120.0},
                "router": {"name": f"{name}-router"},
                "telemetry": {
                    "otlp_endpoint": receiver.endpoint,
                    "otlp_protocol": PROTOCOLS[name],
                },
            }
        )
        deploy(build_app(config), name=name, route_prefix=f"/{name}", wait=Event().wait)
        yield Traced(
            Running(
                url=f"http://127.0.0.1:{ray_port}/{name}",
                config=config,
                pipelines=serve.get_deployment_handle("Pipeline", name),
            ),
            receiver,
        )
        serve.delete(name)


def _missing(spans: list[WrittenSpan]) -> bool:
    """Whether ranks have spans still to send: both write one for each round with stages."""
    verified = [span.parent_id for span in spans if span.name == names.SPAN_VERIFY]
    by_rank = [span.parent_id for span in spans if span.name == names.SPAN_VERIFY_RANK]
    return sorted(by_rank) != sorted([*verified, *verified])  # type: ignore[type-var]


def _expect_inside(spans: list[WrittenSpan], parent: WrittenSpan) -> None:
    """Every child lies inside its parent, in time."""
    for span in spans:
        if span.parent_id == parent.span_id:
            assert parent.start_us - _SLACK_US <= span.start_us <= span.end_us, (parent, span)
            assert span.end_us <= parent.end_us + _SLACK_US, (parent, span)
            _expect_inside(spans, span)


def _tree(spans: list[WrittenSpan], parent_id: str) -> dict[str, Any]:
    """Returns the names of the spans below this one, each with those below it."""
    tree: dict[str, Any] = {}
    for span in spans:
        if span.parent_id == parent_id:
            tree.setdefault(span.name, {}).update(_tree(spans, span.span_id))
    return tree


def test_a_receiver_gets_the_whole_trace_of_a_request(traced: Traced) -> None:
    answer, trace_id, client_span = traced.ask(return_token_ids=True)
    spans = traced.trace(trace_id)
    stages = {
        names.SPAN_PLAN: {},
        names.SPAN_DRAFT: {},
        names.SPAN_VERIFY: {},
        names.SPAN_VERIFY_RANK: {},
        names.SPAN_COMMIT: {},
    }
    assert _tree(spans, client_span) == {
        "POST /v1/completions": {
            "text_completion tiny": {
                names.SPAN_ROUTE: {},
                names.SPAN_QUEUE: {},
                names.SPAN_PREFILL: {},
                names.SPAN_ROUND: stages,
            }
        }
    }
    (server,) = [span for span in spans if span.parent_id == client_span]
    _expect_inside(spans, server)
    assert len({span.process for span in spans}) == 4  # ingress, drafting actor, two ranks
    assert server.attributes["http.route"] == "/v1/completions"
    assert server.attributes["http.response.status_code"] == 200
    _expect_totals(answer, spans)


def _expect_totals(answer: dict[str, Any], spans: list[WrittenSpan]) -> None:
    """The totals are those of the answer, and of the rounds, which are fewer than get bounded."""
    (request,) = [span for span in spans if span.name == "text_completion tiny"]
    rounds = [span.attributes for span in spans if span.name == names.SPAN_ROUND]
    usage, speculative = answer["usage"], answer["metrics"]["speculative_decoding"]
    of = request.attributes
    assert of["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert of["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 40
    assert of["gen_ai.response.id"] == answer["id"]
    assert of["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    assert of["eesd.draft.tokens"] == speculative["num_draft_tokens"]
    assert of["eesd.accepted.tokens"] == speculative["num_accepted_draft_tokens"]
    assert of["eesd.rounds"] == sum(attributes["eesd.emitted.tokens"] != 0 for attributes in rounds)
    assert of["eesd.draft.tokens"] == sum(attributes["eesd.draft.tokens"] for attributes in rounds)  # type: ignore[misc]
    judged, accepted = of["eesd.judged.tokens"], of["eesd.accepted.tokens"]
    assert accepted <= judged <= of["eesd.draft.tokens"]  # type: ignore[operator]
    assert sum(attributes["eesd.emitted.tokens"] for attributes in rounds) == 40  # type: ignore[misc]
    assert of["eesd.request.interruptions"] == 0
    assert of["eesd.request.speculation"] == "auto"
    assert of["eesd.request.controller"] == "goodput"
    (queue,) = [span for span in spans if span.name == names.SPAN_QUEUE]
    waited_s = of["eesd.request.queue_seconds"]
    assert waited_s == pytest.approx((queue.end_us - queue.start_us) / 1e6, abs=0.5)


def test_texts_do_not_depend_on_tracing(traced: Traced) -> None:
    def text(flags: str) -> Any:
        answer, _, _ = traced.ask(flags=flags, temperature=0.9, return_token_ids=True)
        return answer["choices"][0]["token_ids"]

    assert text("01") == text("00") == text("01")


def test_a_refused_request_arrives_and_one_that_is_not_sampled_does_not(traced: Traced) -> None:
    silent = traced.ask(flags="00")[1]
    with pytest.raises(httpx.HTTPStatusError):
        traced.ask(temperature=-1)

    def refused() -> list[WrittenSpan]:
        spans = traced.receiver.spans
        return [span for span in spans if span.attributes.get(names.HTTP_STATUS) == 400]

    (span,) = until(refused)
    assert span.attributes["error.type"] == "invalid_request_error"
    assert span.status == {}
    assert silent not in {span.trace_id for span in traced.receiver.spans}


def test_the_service_shows_the_same_trace_without_a_receiver(
    traced: Traced, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced.ask()
    answer, trace_id, _ = traced.ask()
    span_ids = {span.span_id for span in traced.trace(trace_id)}
    url, request_id = traced.running.url, f"r-{trace_id[:8]}"
    for name in (request_id, answer["id"]):
        trace = httpx.get(f"{url}/debug/traces/{name}", timeout=30.0).json()
        assert trace["request_id"] == request_id
        assert {span["span_id"] for span in trace["spans"]} == span_ids
    latest = httpx.get(f"{url}/debug/traces", params={"limit": 2}, timeout=30.0).json()["traces"]
    assert latest[0] == trace
    assert len(latest) == 2
    assert httpx.get(f"{url}/debug/traces/unknown", timeout=30.0).status_code == 404
    assert httpx.get(f"{url}/debug/traces", params={"limit": 0}, timeout=30.0).status_code == 400

    assert main(["trace", request_id, "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [trace]
    assert main(["trace", request_id, "--url", url, "--stages"]) == 0
    shown = capsys.readouterr().out
    assert request_id in shown
    assert "eesd.verify.rank" in shown
    assert main(["trace", "unknown", "--url", url]) == 1
    assert "keeps no trace of a request unknown" in capsys.readouterr().err
    file = tmp_path / "trace.json"
    assert main(["trace", "--url", url, "--limit", "2", "--perfetto", str(file)]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == sum(
        len(trace_json["spans"]) for trace_json in latest
    )


def test_a_request_that_is_interrupted_says_so_and_its_trace_goes_on(traced: Traced) -> None:
    before = traced.running.state()
    trace_id = f"{random.getrandbits(128):032x}"
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    body = BODY | {"max_tokens": 1500, "stream": True}
    url = f"{traced.running.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=150.0) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        traced.running.signal("drafting actor", signal.SIGKILL)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    traced.running.ready_after(before)

    def finished() -> list[WrittenSpan]:
        spans = [span for span in traced.receiver.spans if span.trace_id == trace_id]
        return spans if any(names.HTTP_METHOD in span.attributes for span in spans) else []

    spans = until(finished)
    (request,) = [span for span in spans if span.name == "text_completion tiny"]
    assert request.status == {}
    assert request.attributes["gen_ai.usage.output_tokens"] == 1500
    num_interruptions = request.attributes["eesd.request.interruptions"]
    assert isinstance(num_interruptions, int)
    assert num_interruptions >= 1
    routes = [span for span in spans if span.name == names.SPAN_ROUTE]
    assert len(routes) > num_interruptions
    assert len([span for span in spans if span.name == names.SPAN_ROUND]) < 200  # of some hundreds
