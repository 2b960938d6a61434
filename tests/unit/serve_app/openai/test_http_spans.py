"""The span of an HTTP request: of answers, refusals and departures."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from eesd_dist.errors import EngineError, QueueFull
from eesd_dist.telemetry import names
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.telemetry.tracing_options import TracingOptions
from serve_app.config import LimitsConfig
from serve_app.openai.api_settings import limits_of
from serve_app.openai.middleware.departures import Departures
from serve_app.openai.middleware.http_spans import TracedRequests
from tests.support.live_server import serving
from tests.support.running import until
from tests.support.spans import WrittenSpan, read_spans
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

BODY = {"prompt": "x", "max_tokens": 4}
COMPLETION = "/v1/completions"
TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ERROR = 2


@dataclass
class Traced:
    http: httpx.Client
    engine: ToyEngine
    tracing: Tracing
    folder: Path

    def spans(self) -> list[WrittenSpan]:
        self.tracing.flush()
        return read_spans(self.folder)

    def server_spans(self, number: int = 1) -> list[WrittenSpan]:
        """Waits until there are so many, and expects no more."""

        def found() -> list[WrittenSpan]:
            return [span for span in self.spans() if names.HTTP_METHOD in span.attributes]

        until(lambda: len(found()) >= number)
        spans = found()
        assert len(spans) == number
        return spans


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    tracing = make_tracing(TracingOptions(folder=str(tmp_path)), process="ingress")
    engine = ToyEngine()
    limits = limits_of(
        LimitsConfig(max_body_bytes=10_000, request_ttl_s=100.0), max_model_len=100, max_running=32
    )
    app = toy_api(engine, max_model_len=100, api_key="k", tracing=tracing, limits=limits)
    app.add_api_route("/debug/things", _nothing)
    connections = httpx.Limits(max_keepalive_connections=0)
    with (
        serving(app) as url,
        httpx.Client(
            base_url=url, headers={"Authorization": "Bearer k"}, timeout=20, limits=connections
        ) as http,
    ):
        yield Traced(http, engine, tracing, tmp_path)
    tracing.close()


async def _nothing() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_request_has_the_request_in_it(traced: Traced, stream: bool) -> None:
    answer = traced.http.post(
        f"{COMPLETION}?secret=1",
        json=BODY | {"stream": stream, "n": 2, "temperature": 1.0},
        headers={
            "traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01",
            "x-request-id": "mine",
            "user-agent": "tester",
        },
    )
    assert answer.status_code == 200
    (server,) = traced.server_spans()
    assert (server.trace_id, server.parent_id) == (TRACE, CLIENT_SPAN)
    assert server.name == f"POST {COMPLETION}"
    assert server.status == {}
    ours = {key: value for key, value in server.attributes.items() if "address" not in key}
    del ours["server.port"]
    assert ours == {
        "http.request.method": "POST",
        "http.route": COMPLETION,
        "http.response.status_code": 200,
        "url.path": COMPLETION,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "user_agent.original": "tester",
        "eesd.request.id": "mine",
    }
    (request,) = [span for span in traced.spans() if span.name == "text_completion toy"]
    assert request.parent_id == server.span_id
    assert server.start_us <= request.start_us <= request.end_us <= server.end_us
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert request.attributes["eesd.rounds"] == 4  # of three tokens and of one, for each text
    assert request.attributes["eesd.accepted.tokens"] == 4
    assert request.attributes["eesd.request.id"] == "mine"
    seconds = request.attributes["eesd.request.time_to_first_token_seconds"]
    assert isinstance(seconds, float)
    assert 0.0 < 1e6 * seconds <= request.end_us - server.start_us


def test_refused_requests_have_spans_and_are_no_errors_of_the_server(traced: Traced) -> None:
    http = traced.http
    http.post(COMPLETION, json=BODY, headers={"Authorization": "Bearer wrong"})
    http.post(COMPLETION, json=BODY | {"temperature": -1})
    http.post(COMPLETION, content=b"x" * 20_000)
    http.get("/nowhere/at/all")
    traced.engine.refusal = QueueFull(num_waiting=9, limit=9)
    http.post(COMPLETION, json=BODY)
    spans = traced.server_spans(5)
    errors = [(span.attributes[names.HTTP_STATUS], span.attributes["error.type"]) for span in spans]
    assert errors == [
        (401, "invalid_api_key"),
        (400, "invalid_request_error"),
        (413, "request_too_large"),
        (404, "not_found_error"),
        (429, "queue_full"),
    ]
    assert [span.name for span in spans] == [f"POST {COMPLETION}"] * 3 + ["GET"] + [
        f"POST {COMPLETION}"
    ]
    assert all(span.status == {} for span in spans)


def test_errors_of_the_server_are_errors(traced: Traced) -> None:
    traced.engine.refusal = EngineError("broken")
    assert traced.http.post(COMPLETION, json=BODY).status_code == 503
    traced.engine.refusal = ValueError("a bug")
    assert traced.http.post(COMPLETION, json=BODY).status_code == 500
    spans = traced.server_spans(2)
    assert [span.attributes[names.HTTP_STATUS] for span in spans] == [503, 500]
    assert all(span.status["code"] == ERROR for span in spans)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_no_error(traced: Traced, stream: bool) -> None:
    traced.engine.stalls_after = 2
    body = BODY | {"stream": stream, "max_tokens": 50}
    with pytest.raises(httpx.ReadTimeout):
        traced.http.post(COMPLETION, json=body, timeout=1.0)
    (server,) = traced.server_spans()
    assert server.attributes["eesd.request.client_left"] is True
    assert server.attributes.get(names.HTTP_STATUS) == 499
    assert "error.type" not in server.attributes
    (request,) = [span for span in traced.spans() if span.name == "text_completion toy"]
    assert server.status == request.status == {}
    assert request.attributes["eesd.request.client_left"] is True
    assert request.attributes["gen_ai.usage.output_tokens"] == 3  # so far


def test_probes_scrapes_and_pages_of_operators_have_no_spans(traced: Traced) -> None:
    for path in ("/health", "/metrics", "/ping", "/debug/things"):
        assert traced.http.get(path).status_code == 200
    assert traced.http.get("/v1/models").status_code == 200
    (span,) = traced.server_spans()
    assert span.name == "GET /v1/models"


def test_a_request_that_is_not_sampled_leaves_nothing_and_tells_the_engine(traced: Traced) -> None:
    silent = f"00-{TRACE}-{CLIENT_SPAN}-00"
    traced.http.post(COMPLETION, json=BODY, headers={"traceparent": silent})
    assert traced.spans() == []
    (request,) = traced.engine.requests
    assert request.traceparent is not None
    assert request.traceparent.startswith(f"00-{TRACE}-")
    assert request.traceparent.endswith("-00")


def test_a_request_that_is_cancelled_was_left(tmp_path: Path) -> None:
    tracing = make_tracing(TracingOptions(folder=str(tmp_path)), process="ingress")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def run() -> None:
        scope: dict[str, Any] = {
            "type": "http", "method": "BREW", "path": "/x" * 500, "headers": [],
        }  # fmt: skip
        task = asyncio.ensure_future(
            TracedRequests(Departures(app), tracer=tracing.tracer, routes=())(scope, receive, send)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    tracing.close()
    (span,) = read_spans(tmp_path)
    assert span.name == span.attributes[names.HTTP_METHOD] == "_OTHER"
    assert len(str(span.attributes["url.path"])) == 256
    assert span.attributes["eesd.request.client_left"] is True
    assert span.status == {}


def test_without_tracing_there_is_no_middleware() -> None:
    app = toy_api(ToyEngine(), max_model_len=100, tracing=Tracing())
    assert TracedRequests not in [middleware.cls for middleware in app.user_middleware]
