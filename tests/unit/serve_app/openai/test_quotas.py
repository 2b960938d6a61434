"""Keys and their limits as a client sees them: statuses, headers, metrics."""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import yaml

from eesd_dist.errors import EngineError, PoisonRequest, QueueFull, RequestError
from serve_app.ingress.quotas import GlobalQuotas
from serve_app.openai.charges import GRAMMAR_TOKENS
from serve_app.openai.context import RequestContext
from serve_app.openai.generation import EndedByEngine
from serve_app.openai.keys import KeyRing, operators_key
from serve_app.openai.middleware.http_metrics import HttpMetrics
from serve_app.openai.schema import ChatFields, CompletionFields
from tests.support.event_stream import WITH_IDS
from tests.support.live_server import serving
from tests.support.running import until
from tests.support.toy_api import toy_api, toy_preparation
from tests.support.toy_engine import ToyEngine

KEYS: dict[str, dict[str, object]] = {
    "search": {"max_concurrent_requests": 1, "weight": 2.0},
    "nightly": {"tokens_per_minute": 60, "priority": 3},
    "free": {},
}


class Site:
    """An API, its engine, and clients by the name of their key."""

    def __init__(self, url: str, engine: ToyEngine, metrics: HttpMetrics) -> None:
        self.url, self.engine, self.metrics = url, engine, metrics

    def post(self, name: str, **fields: object) -> httpx.Response:
        body = {"model": "toy", "prompt": "abc", "max_tokens": 6, "seed": 1, **fields}
        headers = {"Authorization": f"Bearer secret of {name}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=20)

    def get(self, name: str, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer secret of {name}"}
        return httpx.get(self.url + path, headers=headers, timeout=20)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    file = tmp_path / "keys.yaml"
    entries = [
        {"name": name, "sha256": hashlib.sha256(f"secret of {name}".encode()).hexdigest(), **limits}
        for name, limits in KEYS.items()
    ]
    file.write_text(yaml.safe_dump({"keys": entries}))
    engine, metrics = ToyEngine(), HttpMetrics(ingress="i")
    app = toy_api(
        engine,
        max_model_len=200,
        api_key="root",
        keys=KeyRing(operators_key("root"), file=file),
        quotas=GlobalQuotas(app="a", ingress="i", router=lambda: None),
        http_metrics=metrics,
        resume_window_s=10.0,
    )

    async def state() -> dict[str, str]:
        return {"state": "well"}

    app.add_api_route("/debug/state", state)
    with serving(app) as url:
        yield Site(url, engine, metrics)


def test_each_key_opens_the_api_and_only_operators_the_rest(site: Site) -> None:
    for name in KEYS:
        assert site.post(name).status_code == 200
        response = site.get(name, "/debug/state")
        assert (response.status_code, response.json()["error"]["code"]) == (
            403,
            "operator_key_needed",
        )
    assert site.post("anyone").status_code == 401
    headers = {"Authorization": "Bearer root"}
    assert httpx.get(f"{site.url}/debug/state", headers=headers).status_code == 200
    assert httpx.get(f"{site.url}/debug/state", headers={}).status_code == 401


def test_with_a_file_that_is_wrong_from_the_start_keys_are_refused_until_it_is_mended(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [")
    ring = KeyRing(operators_key("root"), file=file, must_be_right=False)
    app = toy_api(ToyEngine(), max_model_len=200, api_key="root", keys=ring)
    with serving(app) as url:

        def status(authorization: str) -> tuple[int, str | None]:
            headers = {"Authorization": authorization} if authorization else {}
            answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=20)
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert status("Bearer secret of search") == (503, "keys_unknown")
        assert status("Bearer root") == (200, None)
        for wrong in ("", "Basic secret"):
            assert status(wrong) == (401, "invalid_api_key")
        assert httpx.get(f"{url}/health").status_code == 200
        digest = hashlib.sha256(b"secret of search").hexdigest()
        file.write_text(yaml.safe_dump({"keys": [{"name": "search", "sha256": digest}]}))
        ring.reread()
        assert status("Bearer secret of search") == (200, None)
        assert status("Bearer other") == (401, "invalid_api_key")


def test_the_engine_is_told_whose_request_it_is(site: Site) -> None:
    site.post("search")
    site.post("nightly", priority=4)
    callers = [
        (request.caller, request.weight, request.priority) for request in site.engine.requests
    ]
    assert callers == [("search", 2.0, 0), ("nightly", 1.0, 7)]
    response = site.post("search", priority=-1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


def test_a_key_has_so_many_requests_at_a_time(site: Site) -> None:
    site.engine.delay_s = 0.2
    first: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: first.append(site.post("search", max_tokens=30)))
    asking.start()
    while not site.engine.num_live:
        time.sleep(0.01)
    response = site.post("search")
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "concurrency_limit"
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-ratelimit-limit-concurrent"] == "1"
    assert response.headers["x-ratelimit-remaining-concurrent"] == "0"
    assert site.post("free", max_tokens=3).status_code == 200
    asking.join()
    assert first[0].status_code == 200
    assert first[0].headers["x-ratelimit-remaining-concurrent"] == "0"
    site.engine.delay_s = 0.0
    assert site.post("search").status_code == 200


@pytest.mark.parametrize("ending", ["left", "broken", "invalid", "large"])
def test_every_end_of_a_request_returns_its_permit(site: Site, ending: str) -> None:
    if ending == "left":
        site.engine.delay_s = 0.2
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{site.url}/v1/completions",
                json={"prompt": "abc", "max_tokens": 100},
                headers={"Authorization": "Bearer secret of search"},
                timeout=0.5,
            )
        site.engine.delay_s = 0.0
        while site.engine.num_live:
            time.sleep(0.01)
    elif ending == "broken":
        site.engine.refusal = RuntimeError("toy broke")
        assert site.post("search").status_code == 500
        site.engine.refusal = None
    elif ending == "invalid":
        assert site.post("search", temperature="hot").status_code == 400
    else:
        assert site.post("search", prompt="x" * 2**21).status_code == 413
    deadline_s = time.monotonic() + 5
    while (answer := site.post("search")).status_code == 429 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert answer.status_code == 200


def test_tokens_of_prompts_and_answers_count(site: Site) -> None:
    first = site.post("nightly", prompt="abcdefghij", max_tokens=30)
    assert first.headers["x-ratelimit-limit-tokens"] == "60"
    assert first.headers["x-ratelimit-remaining-tokens"] == "60"
    second = site.post("nightly", prompt="abcdefghij", max_tokens=40)
    assert second.status_code == 200, "it is served to its end"
    assert 19 < int(second.headers["x-ratelimit-remaining-tokens"]) < 30
    response = site.post("nightly")
    assert (response.status_code, response.json()["error"]["code"]) == (429, "token_limit")
    assert 20 < int(response.headers["retry-after"]) <= 33
    assert response.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert site.get("nightly", "/v1/models").status_code == 200, "reading costs nothing"


def test_prompts_of_which_only_log_probabilities_are_asked_count_too(site: Site) -> None:
    fields = {"prompt": "x" * 60, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert site.post("nightly", **fields).status_code == 200
    assert site.post("nightly", **fields).status_code == 429


def test_metrics_say_what_each_key_uses(site: Site) -> None:
    site.post("search", prompt="abc", max_tokens=6)
    site.post("search", temperature="hot")
    page = site.metrics.page().decode()
    for line in (
        'eesd_key_requests_total{ingress="i",key="search",status="200"} 1.0',
        'eesd_key_requests_total{ingress="i",key="search",status="400"} 1.0',
        'eesd_key_tokens_total{ingress="i",key="search",kind="prompt"} 3.0',
        'eesd_key_tokens_total{ingress="i",key="search",kind="generated"} 6.0',
    ):
        assert line in page


def test_head_counts_as_get_does(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    headers = {"Authorization": "Bearer secret of search"}
    for path, status in (("/v1/models", 200), ("/v1/models/none", 404), ("/debug/state", 403)):
        assert httpx.head(site.url + path, headers=headers).status_code == status
        assert site.get("search", path).status_code == status
    expected = [
        *[
            f'eesd_key_requests_total{{ingress="i",key="search",status="{status}"}} 2.0'
            for status in (200, 404, 403)
        ],
        *[
            f'eesd_http_refused_requests_total{{ingress="i",reason="{reason}"}} 2.0'
            for reason in ("operator_key_needed", "model_not_found")
        ],
    ]

    def is_counted() -> bool:  # after the answer
        page = site.metrics.page().decode()
        return all(line in page for line in expected)

    until(is_counted)
    lines = [r.getMessage() for r in caplog.records if "method=HEAD" in r.getMessage()]
    assert len(lines) == 2, "a refusal is a line of another kind"
    assert all("key=search" in line for line in lines)


def test_a_caller_cannot_resume_the_stream_of_another(site: Site) -> None:
    body = {"model": "toy", "prompt": "abc", "max_tokens": 12, "seed": 1, "stream": True}

    def lines(name: str, **headers: str) -> tuple[int, list[str]]:
        headers["Authorization"] = f"Bearer secret of {name}"
        with httpx.stream(
            "POST", f"{site.url}/v1/completions", json=body, headers=headers, timeout=20
        ) as answer:
            return answer.status_code, list(answer.iter_lines())

    _, stream_lines = lines("free", **WITH_IDS)
    event_id = next(line.removeprefix("id: ") for line in stream_lines if line.startswith("id: "))
    assert lines("search", **{"Last-Event-ID": event_id})[0] == 400
    assert lines("free", **{"Last-Event-ID": event_id})[0] == 200


def _leave(site: Site, name: str, **fields: object) -> None:
    """Sends a request and closes the connection before its first token."""
    num_requests = len(site.engine.requests)
    site.engine.stalls_after = 0
    connection = HTTPConnection(site.url.removeprefix("http://"), timeout=20)
    connection.request(
        "POST",
        "/v1/completions",
        body=json.dumps({"prompt": "x" * 40, "max_tokens": 10, **fields}),
        headers={
            "Authorization": f"Bearer secret of {name}",
            "Content-Type": "application/json",
        },
    )
    until(lambda: site.engine.num_live)
    connection.close()
    until(lambda: not site.engine.num_live)
    site.engine.stalls_after = None
    assert len(site.engine.requests) == num_requests + 1


def _used(site: Site, kind: str) -> float:
    line = f'eesd_key_tokens_total{{ingress="i",key="nightly",kind="{kind}"}} '
    values = [
        sample for sample in site.metrics.page().decode().splitlines() if sample.startswith(line)
    ]
    return float(values[0].removeprefix(line)) if values else 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_is_charged_its_prompt(
    site: Site, stream: bool
) -> None:
    _leave(site, "nightly", stream=stream)
    until(lambda: _used(site, "prompt") == 40.0)
    answer = site.post("nightly", prompt="x", max_tokens=1)
    assert answer.status_code == 200
    assert 19 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 25


def test_clients_that_leave_again_and_again_are_refused(site: Site) -> None:
    for _ in range(2):
        _leave(site, "nightly")
    until(lambda: _used(site, "prompt") == 80.0)
    num_requests = len(site.engine.requests)
    responses = [site.post("nightly") for _ in range(5)]
    assert [(response.status_code, response.json()["error"]["code"]) for response in responses] == [
        (429, "token_limit")
    ] * 5
    assert len(site.engine.requests) == num_requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (QueueFull(num_waiting=1, limit=1), 429),
        (EngineError("no pipeline is ready"), 503),
        (RequestError("not here"), 400),
        (RuntimeError("toy broke"), 500),
    ],
)
def test_what_the_service_refuses_or_fails_before_its_first_token_costs_nothing(
    site: Site, refusal: Exception, status: int, stream: bool
) -> None:
    site.engine.refusal = refusal
    for _ in range(3):
        assert site.post("nightly", prompt="x" * 50, stream=stream).status_code == status
    site.engine.refusal = None
    answer = site.post("nightly", prompt="x", max_tokens=1)
    assert answer.headers["x-ratelimit-remaining-tokens"] == "60"


@pytest.mark.parametrize(
    "breakage",
    [EndedByEngine("its own fault"), PoisonRequest(request_id="r", crashes=2, reason="died")],
)
def test_what_ends_an_engine_of_its_own_fault_costs_its_prompt(
    site: Site, breakage: Exception
) -> None:
    site.engine.refusal = breakage
    assert 400 <= site.post("nightly", prompt="x" * 50).status_code < 500
    assert _used(site, "prompt") == 50.0


def test_a_burst_of_requests_is_refused_behind_the_limit_before_it_is_computed(site: Site) -> None:
    site.engine.delay_s = 0.3
    options = {"prompt": "x" * 30, "max_tokens": 20}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: site.post("nightly", **options), range(8)))
    site.engine.delay_s = 0.0
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] * 2 + [429] * 6, "the second one begins with ten tokens left"
    assert len(site.engine.requests) == 2


def test_an_answer_of_which_no_length_is_stated_leaves_other_requests_room() -> None:
    preparation = toy_preparation(max_model_len=10_000)

    def expected(**fields: object) -> int:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        prepared = preparation.chat(ChatFields.model_validate(body), RequestContext())
        return prepared.num_expected_tokens - prepared.num_prompt_tokens

    assert expected() == 1024
    assert expected(n=3) == 3 * 1024
    assert expected(min_tokens=2000) == 2000
    assert expected(max_tokens=5000, n=2) == 10_000
    assert expected(max_completion_tokens=7) == 7
    fields = CompletionFields.model_validate({"prompt": ["a", "bc"], "n": 2})
    assert preparation.completion(fields, RequestContext()).num_expected_tokens == 3 + 4 * 16


def test_tokenising_detokenising_and_grammars_count_too(site: Site) -> None:
    headers = {"Authorization": "Bearer secret of nightly"}

    def post(path: str, body: object) -> httpx.Response:
        return httpx.post(site.url + path, json=body, headers=headers, timeout=20)

    assert post("/tokenize", {"prompt": "x" * 20}).status_code == 200
    assert post("/detokenize", {"tokens": [65] * 30}).status_code == 200
    assert _used(site, "work") == 50.0
    assert 9 < int(post("/tokenize", {"prompt": ""}).headers["x-ratelimit-remaining-tokens"]) < 15
    wrong = site.post("nightly", guided_regex="(")
    assert wrong.status_code == 400
    assert _used(site, "work") == 50.0 + GRAMMAR_TOKENS, "it was compiled, to be refused"
    assert post("/detokenize", {"tokens": [65]}).status_code == 429
    assert post("/tokenize", {"prompt": "x"}).status_code == 429
    assert site.post("nightly", guided_choice=["a"]).status_code == 429
    assert not site.engine.requests
