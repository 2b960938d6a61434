"""What an ingress counts is what its clients saw."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from serve_app.openai.middleware.departures import Departures
from serve_app.openai.middleware.http_metrics import CountedRequests, HttpMetrics
from tests.support.live_server import serving
from tests.support.running import until
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

BODY = {"prompt": "x", "max_tokens": 4}
COMPLETION = "/v1/completions"


@dataclass
class Counted:
    http: httpx.Client
    metrics: HttpMetrics
    engine: ToyEngine

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Returns the values that are not 0, by their labels other than the ingress."""
        samples = {}
        for family in text_string_to_metric_families(self.metrics.page().decode()):
            for sample in family.samples:
                if sample.name == name and sample.value:
                    assert sample.labels.pop("ingress") == "a"
                    samples[tuple(sample.labels.values())] = sample.value
        return samples


@pytest.fixture
def site() -> Iterator[Counted]:
    metrics, engine = HttpMetrics(ingress="a"), ToyEngine()
    app = toy_api(engine, max_model_len=100, api_key="k", http_metrics=metrics)
    headers = {"Authorization": "Bearer k"}
    limits = httpx.Limits(max_keepalive_connections=0)  # an error of ours ends its connection
    with (
        serving(app) as url,
        httpx.Client(base_url=url, headers=headers, timeout=20, limits=limits) as http,
    ):
        yield Counted(http, metrics, engine)


def test_answers_are_counted_by_path_and_status(site: Counted) -> None:
    http = site.http
    assert http.post(COMPLETION, json=BODY).status_code == 200
    assert http.post(COMPLETION, json=BODY | {"stream": True}).status_code == 200
    assert http.post(COMPLETION, json=BODY | {"temperature": -1}).status_code == 400
    assert http.get("/v1/models/toy").status_code == 200
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/health").status_code == 200
    assert http.get("/a/path/of/none").status_code == 404
    assert http.post("/health", json={}).status_code == 405
    wrong = {"Authorization": "Bearer l"}
    assert http.post(COMPLETION, json=BODY, headers=wrong).status_code == 401
    assert site.samples("eesd_http_requests_total") == {
        (COMPLETION, "200"): 2,
        (COMPLETION, "400"): 1,
        (COMPLETION, "401"): 1,
        ("/v1/models/{name}", "200"): 1,
        ("/v1/models/{name}", "404"): 1,
        ("/health", "200"): 1,
        ("/health", "405"): 1,
        ("other", "404"): 1,
    }
    assert site.samples("eesd_http_open_requests") == {}


def test_refusals_are_counted_by_their_reason(site: Counted) -> None:
    http = site.http
    http.post(COMPLETION, json=BODY | {"temperature": -1})
    http.post(COMPLETION, json=BODY | {"prompt": "x" * 200})
    http.post(COMPLETION, content=b"{", headers={"Content-Type": "application/json"})
    http.post(COMPLETION, json=BODY, headers={"Authorization": "Bearer l"})
    http.post(COMPLETION, json=BODY | {"model": "other"})
    assert site.samples("eesd_http_refused_requests_total") == {
        ("invalid_request_error",): 2,
        ("context_length_exceeded",): 1,
        ("invalid_api_key",): 1,
        ("model_not_found",): 1,
    }


def test_errors_of_ours_and_departures_are_told_apart(site: Counted) -> None:
    site.engine.refusal = RuntimeError("a bug")
    assert site.http.post(COMPLETION, json=BODY).status_code == 500
    site.engine.refusal = None
    site.engine.stalls_after = 0
    with pytest.raises(httpx.ReadTimeout):
        site.http.post(COMPLETION, json=BODY, timeout=0.3)
    until(lambda: site.samples("eesd_http_open_requests") == {})
    assert site.samples("eesd_http_requests_total") == {
        (COMPLETION, "500"): 1,
        (COMPLETION, "499"): 1,
    }
    assert site.samples("eesd_http_refused_requests_total") == {("internal_error",): 1}


def test_a_request_that_is_cancelled_is_one_that_left() -> None:
    """Ray cancels the request of a client that has left."""
    metrics = HttpMetrics(ingress="a")

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def nothing(*_: object) -> Any:
        raise AssertionError

    async def cancelled() -> None:
        app = CountedRequests(Departures(waits), metrics=metrics, routes=[])
        request = app({"type": "http", "path": "/"}, nothing, nothing)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(request, timeout=0.05)

    asyncio.run(cancelled())
    page = metrics.page().decode()
    assert 'eesd_http_requests_total{ingress="a",path="other",status="499"} 1.0' in page
    assert "eesd_http_refused_requests_total{" not in page


def test_texts_end_for_the_client_as_they_end_for_it(site: Counted) -> None:
    site.engine.script = lambda _: list(b"hello world")
    http = site.http
    stopped = http.post(COMPLETION, json=BODY | {"max_tokens": 9, "stop": "lo"}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    cut = http.post(COMPLETION, json=BODY | {"n": 2}).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert site.samples("eesd_client_finished_texts_total") == {("stop",): 1, ("length",): 2}
    assert site.samples("eesd_client_time_to_first_token_seconds_count") == {(): 3}
    assert site.samples("eesd_client_request_seconds_count") == {(): 3}
