"""Keys and their limits as a client sees them: statuses, headers, metrics."""

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.ingress.quotas import GlobalQuotas
from serve_app.keys import KeyRing, operators_key
from serve_app.openai.middleware.http_metrics import HttpMetrics
from tests.support.live_server import serving
from tests.support.running import until
from tests.support.toy_api import toy_api
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
        refused = site.get(name, "/debug/state")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
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
    told = [(each.caller, each.weight, each.priority) for each in site.engine.requests]
    assert told == [("search", 2.0, 0), ("nightly", 1.0, 7)]
    refused = site.post("search", priority=-1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_a_key_has_so_many_requests_at_a_time(site: Site) -> None:
    site.engine.delay_s = 0.2
    first: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: first.append(site.post("search", max_tokens=30)))
    asking.start()
    while not site.engine.num_live:
        time.sleep(0.01)
    refused = site.post("search")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "concurrency_limit"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-ratelimit-limit-concurrent"] == "1"
    assert refused.headers["x-ratelimit-remaining-concurrent"] == "0"
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
    refused = site.post("nightly")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "token_limit")
    assert 20 < int(refused.headers["retry-after"]) <= 33
    assert refused.headers["x-ratelimit-reset-tokens"].endswith("s")
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
    assert len(lines) == 3
    assert all("key=search" in line for line in lines)


def test_a_caller_cannot_resume_the_stream_of_another(site: Site) -> None:
    body = {"model": "toy", "prompt": "abc", "max_tokens": 12, "seed": 1, "stream": True}

    def lines(name: str, **headers: str) -> tuple[int, list[str]]:
        headers["Authorization"] = f"Bearer secret of {name}"
        with httpx.stream(
            "POST", f"{site.url}/v1/completions", json=body, headers=headers, timeout=20
        ) as answer:
            return answer.status_code, list(answer.iter_lines())

    _, told = lines("free")
    event_id = next(line.removeprefix("id: ") for line in told if line.startswith("id: "))
    assert lines("search", **{"Last-Event-ID": event_id})[0] == 400
    assert lines("free", **{"Last-Event-ID": event_id})[0] == 200
