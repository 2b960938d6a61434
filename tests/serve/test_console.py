"""The console in Chromium, on a real service with a key, two pipelines, and a prefix."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import pytest
import ray
import yaml
from playwright.sync_api import Browser, expect
from pydantic import SecretStr
from ray import serve

from serve_app.app import application_of
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.browser import CHROMIUM, Visit, chromium, visiting
from tests.support.running import Running, until

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
    pytest.mark.timeout(600),
]
NAME = "seen"
KEY = "kéy"
HEADERS = {"Authorization": f"Bearer {KEY}".encode()}
TENANT = "key of a tenant"
FORBIDDEN = "Failed to load resource: the server responded with a status of 403 (Forbidden)"
UNAUTHORIZED = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
LETTERS = "[a-z]{3000}"
"""An answer that does not end by itself for a while."""
ESCAPE_AFTER_20_TOKENS = """() => {
    new MutationObserver((_, observer) => {
        if (document.querySelectorAll("#transcript .token").length <= 20) return;
        observer.disconnect();
        window.couldStop = !document.querySelector("#stop").disabled;
        document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
    }).observe(document.body, {childList: true, subtree: true});
}"""
"""Presses the key in the page: on a busy machine the answer ends before the test presses it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    entry = {"name": "tenant", "sha256": hashlib.sha256(TENANT.encode()).hexdigest()}
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    return file


@pytest.fixture(scope="module")
def seen(ray_port: int, tiny_service: Path, keys_file: Path) -> Iterator[Running]:
    config = service_config(
        {
            "engine": {
                "model": {"path": str(tiny_service), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 256},
            },
            "model_name": "tiny",
            "app_name": NAME,
            "keys_file": str(keys_file),
            "router": {"name": f"{NAME}-router"},
            "pipelines": {"min_count": 2, "max_count": 2},
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    application = application_of(config, api_key=SecretStr(KEY))
    deploy(application, name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    running = Running(
        url=f"http://127.0.0.1:{ray_port}/{NAME}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", NAME),
    )
    until(lambda: len(_ready(running)) == 2, timeout_s=300)
    yield running
    serve.delete(NAME)
    ray.kill(ray.get_actor(f"{NAME}-router", namespace=config.router.namespace))


@pytest.fixture
def visit(browser: Browser, seen: Running) -> Iterator[Visit]:
    """A tab with the right key; at the end it has complained about the missing one at most."""
    with visiting(browser, f"{seen.url}/console") as visit:
        visit.use_key(KEY)
        visit.until_status("ready")
        yield visit
        for pipeline in _state(seen)["pipelines"]:  # shown where the test has failed
            logger.info("after the test: %s", pipeline)
        assert set(visit.complaints) <= {UNAUTHORIZED}


def _state(running: Running) -> dict[str, Any]:
    answer = httpx.get(f"{running.url}/debug/state", headers=HEADERS, timeout=30)
    state: dict[str, Any] = answer.raise_for_status().json()
    return state


def _ready(running: Running) -> list[str]:
    """Returns the names of the pipelines that take requests."""
    answer = httpx.get(f"{running.url}/debug/state", headers=HEADERS, timeout=30)
    pipelines = answer.json().get("pipelines", []) if answer.is_success else []
    return sorted(p["pipeline"] for p in pipelines if p["is_ready"] and not p["draining"])


def _asked(running: Running, **fields: object) -> httpx.Response:
    body = {"prompt": "the quick", **fields}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=HEADERS, timeout=120)


def test_a_stream_shows_each_tokens_origin_and_the_text_of_the_api(
    visit: Visit, seen: Running
) -> None:
    visit.send("the quick", kind="completion", seed="7", max_tokens="120", controller="fixed")
    visit.page.locator("#transcript .token").first.wait_for()
    visit.until_ended()
    sampled = {"seed": 7, "max_tokens": 120, "temperature": 0.7}
    assert visit.bodies()[-1]["speculation"] == {"mode": "auto", "controller": "fixed"}
    assert visit.text() == _asked(seen, **sampled).json()["choices"][0]["text"]

    counts = {
        origin: visit.tokens(origin) for origin in ("accepted", "recovered", "bonus", "target")
    }
    assert sum(counts.values()) == visit.tokens() > 20
    assert min(counts["accepted"], counts["recovered"], counts["bonus"]) > 0
    for origin, count in counts.items():
        assert visit.page.locator(f"#legend [data-count={origin}]").text_content() == str(count)
    lines = {
        origin: visit.page.locator(f"#transcript .{origin}").first.evaluate(
            "element => getComputedStyle(element).borderBottomStyle"
        )
        for origin in ("accepted", "recovered", "bonus")
    }
    assert lines == {"accepted": "solid", "recovered": "dashed", "bonus": "double"}

    figures = visit.page.locator("#figures").inner_text()
    figure = re.search(r"accepted / drafted\s+(\d+) / (\d+)", figures)
    assert figure, figures
    accepted, drafted = map(int, figure.groups())
    assert counts["accepted"] <= accepted <= drafted
    cells = visit.page.locator("#steps i")
    assert cells.count() == drafted
    assert visit.page.locator("#steps i.accepted").count() == accepted
    paths = httpx.get(f"{seen.url}/openapi.json", headers=HEADERS, timeout=30).json()["paths"]
    source = "trace of console-" if "/debug/traces" in paths else "as this page measured it"
    expect(visit.page.locator("#waterfall .hint")).to_contain_text(source)
    assert visit.page.locator("#waterfall .waterfall li").count() >= 3


def test_tokens_are_shown_while_the_answer_streams_and_escape_ends_it(
    visit: Visit, seen: Running
) -> None:
    visit.set(structure="regex", grammar=LETTERS)
    visit.page.evaluate(ESCAPE_AFTER_20_TOKENS)
    visit.send("x", kind="completion", max_tokens="3000")
    expect(visit.page.locator("#status")).to_have_text("Stopped.")
    assert visit.page.evaluate("window.couldStop")
    assert 20 < visit.tokens() < 3000
    until(lambda: not any(p["num_live"] for p in _state(seen)["pipelines"]))
    assert visit.page.locator("#error *").count() == 0
    visit.set(structure="")
    visit.send("and now", max_tokens="4")
    visit.until_ended()
    assert visit.tokens() <= 4


def test_speculation_schema_and_chat_are_switched(visit: Visit) -> None:
    visit.send("the quick", mode="off", max_tokens="12", seed="3")
    visit.until_ended()
    assert visit.tokens("target") == visit.tokens() > 0
    assert visit.bodies()[-1]["speculation"] == {"mode": "off"}
    first = visit.text()

    schema = {
        **{"type": "object", "properties": {"a": {"enum": [1, 2]}}},
        **{"required": ["a"], "additionalProperties": False},
    }
    visit.set(mode="auto", controller="beta", structure="json", grammar=json.dumps(schema))
    visit.send("and then", max_tokens="200")
    visit.until_ended()
    jsonschema.validate(json.loads(visit.text()), schema)
    body = visit.bodies()[-1]
    assert body["speculation"] == {"mode": "auto", "controller": "beta"}
    assert [message["content"] for message in body["messages"]] == ["the quick", first, "and then"]
    visit.page.get_by_role("button", name="Clear").click()
    assert visit.page.locator("#transcript *").count() == 0


def test_what_a_model_generates_is_text(visit: Visit) -> None:
    payload = '<img src="x" onerror="alert(1)"><script>alert(2)</script>'
    pattern = re.escape(payload).replace('\\"', '"')
    visit.set(structure="regex", grammar=pattern)
    visit.send(payload, kind="completion", max_tokens="200")
    visit.until_ended()
    assert visit.text() == payload
    assert visit.page.locator("#transcript :is(img, script)").count() == 0
    assert visit.page.locator(".asked").text_content() == payload


def test_errors_are_shown_as_the_service_says_them(visit: Visit, seen: Running) -> None:
    error = _asked(seen, structured_outputs={"regex": "(("}, stream=True).json()["error"]
    visit.set(structure="regex", grammar="((")
    visit.send("x", kind="completion")
    assert visit.error() == error["message"]
    visit.set(structure="", temperature="3")
    visit.send("x")
    assert visit.error() == _asked(seen, temperature=3).json()["error"]["message"]
    expect(visit.page.locator("#error code")).to_have_text("HTTP 400 · temperature")
    visit.complaints[:] = [c for c in visit.complaints if "status of 400" not in c]


def test_comparing_speculation_off_and_on_finds_equal_texts(visit: Visit) -> None:
    # A text that may end can end in its first round, and has no tokens/s then.
    visit.set(kind="completion", max_tokens="60", structure="regex", grammar=LETTERS)
    visit.set(temperature="0.9", controller="fixed")
    visit.page.get_by_label("Prompt").fill("the quick brown")
    visit.page.get_by_role("button", name="Compare").click()
    visit.until_ended()
    off, on = visit.page.locator(".column .answer").all_text_contents()
    assert off == on != ""
    assert visit.page.locator(".column").first.locator(".target").count() > 0
    assert visit.page.locator(".column").last.locator(".accepted").count() > 0
    seeds = {body["seed"] for body in visit.bodies()[-2:]}
    assert len(seeds) == 1
    comparison = visit.page.locator(".comparison[data-equal=true]")
    expect(comparison.locator(".verdict")).to_contain_text("The texts are equal")
    for name, unit in (("tokens/s", ""), ("first token", " ms")):
        row = comparison.get_by_role("row", name=name)
        for cell in row.get_by_role("cell").all_text_contents():
            assert re.fullmatch(rf"[\d,.]+{unit}", cell), cell


def test_a_comparison_names_the_first_difference(visit: Visit) -> None:
    """Such texts do not come from a service that works: they are made here."""
    verdict = visit.page.evaluate(
        """async () => {
            const { comparison } = await import("./console/compare.js");
            const { Generation } = await import("./console/tokens.js");
            const [off, on] = [["a", "b", "c"], ["a", "x"]].map((texts) => {
                const generation = new Generation("");
                const token_origins = texts.map(() => "target");
                const choice = { token_origins, token_texts: texts, per_step_drafted: [] };
                generation.add({ choices: [choice] });
                return generation;
            });
            const text = comparison(off, on).querySelector(".verdict").textContent;
            const marked = [off, on].map((g) => g.element.querySelector(".differs").textContent);
            return [text, ...marked];
        }"""
    )
    assert verdict == [
        'The texts differ from token 2: "b" without speculation, "x" with it. ',
        *("b", "x"),
    ]


def test_a_wrong_key_is_refused_and_a_key_stays_in_its_tab(browser: Browser, seen: Running) -> None:
    with visiting(browser, f"{seen.url}/console") as visit:
        visit.until_status("locked")
        visit.use_key("wrong")
        visit.send("x")
        message = httpx.get(f"{seen.url}/v1/models", timeout=30).json()["error"]["message"]
        assert visit.error() == message
        visit.page.get_by_role("link", name="Operations").click()
        alert = visit.page.locator("#operations-error")
        expect(alert).to_contain_text(message)
        expect(alert.locator("code")).to_have_text("HTTP 401 · invalid_api_key")
        visit.use_key(KEY)
        visit.page.locator(".pipeline").first.wait_for()
        stored = "() => [localStorage, sessionStorage].map((storage) => JSON.stringify(storage))"
        local, session = visit.page.evaluate(stored)
        assert (KEY in local, KEY in session) == (False, True)
        assert visit.page.context.cookies() == []
        visit.page.reload()
        visit.until_status("ready")
        assert set(visit.complaints) == {UNAUTHORIZED}


def test_a_tenants_key_generates_and_is_told_what_it_does_not_open(
    browser: Browser, seen: Running
) -> None:
    with visiting(browser, f"{seen.url}/console") as visit:
        page = visit.page
        visit.until_status("locked")
        visit.use_key(TENANT)
        visit.until_status("ready")
        expect(page.locator("#model")).to_have_text("tiny")
        visit.send("the quick", max_tokens="20", controller="beta")
        visit.until_ended()
        assert visit.tokens() > 0
        expect(page.locator("#waterfall .hint")).to_contain_text("as this page measured it")
        page.get_by_role("link", name="Operations").click()
        view = page.locator("#operations-view")
        expect(view).to_contain_text("Pipelines and controllers are shown with an operator's key")
        expect(view.locator("h2 .pill")).to_have_text("ready")
        assert page.locator("#operations-error *").count() == 0
        assert page.locator(".pipeline").count() == 0
        paths = [urlsplit(r.url).path.removeprefix(f"/{NAME}") for r in visit.requests]
        assert paths.count("/health") > 0
        assert visit.complaints.count(FORBIDDEN) == 1, "asked once"
        assert set(visit.complaints) <= {UNAUTHORIZED, FORBIDDEN}
        visit.use_key(KEY)
        page.locator(".pipeline").first.wait_for()
        expect(page.locator("[name=controller] option").first).to_contain_text("default: ")


def test_pipelines_are_shown_and_drained_while_their_streams_go_on(
    visit: Visit, seen: Running
) -> None:
    sampled = {"max_tokens": 1500, "structured_outputs": {"regex": LETTERS}, "temperature": 1.0}
    undisturbed = _asked(seen, seed=5, **sampled).json()["choices"][0]["text"]
    page = visit.page
    page.get_by_role("link", name="Operations").click()
    cards = page.locator(".pipeline")
    expect(cards).to_have_count(2)
    for name in _ready(seen):
        card = page.locator(f"[data-pipeline={name}]")
        for rank in ("drafting actor", "verify rank 0"):
            expect(card.get_by_role("row", name=rank)).to_be_visible()
    expect(page.get_by_role("row", name="completion/t1")).to_be_visible()

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(_asked, seen, seed=5, **sampled) for _ in range(4)]
        busy = until(lambda: [p for p in _state(seen)["pipelines"] if p["num_live"]])
        name = busy[0]["pipeline"]
        card = page.locator(f"[data-pipeline={name}]")
        card.get_by_role("button", name="Drain").click()
        page.get_by_role("button", name="Cancel").click()
        assert name in _ready(seen)
        card.get_by_role("button", name="Drain").click()
        page.locator("#confirm-yes").click()
        expect(card.locator("h2 .pill")).to_have_text("draining")
        expect(card.locator(".reason")).to_have_text("drained by hand")
        answers = [stream.result() for stream in streams]
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {undisturbed}

    # Two ingresses answer, each with a state that may be a second old.
    (other,) = until(lambda: ready if len(ready := _ready(seen)) == 1 else None)
    page.locator(f"[data-pipeline={other}]").get_by_role("button", name="Drain").click()
    page.locator("#confirm-yes").click()
    alert = page.locator("#operations-error")
    expect(alert).to_contain_text(f"{other} goes on: no other pipeline takes requests")
    expect(alert).to_contain_text("HTTP 409 · not_drained")
    visit.complaints[:] = [c for c in visit.complaints if "status of 409" not in c]

    card = page.locator(f"[data-pipeline={name}]")
    card.get_by_role("button", name="Undrain").click()
    page.locator("#confirm-yes").click()
    expect(card.locator("h2 .pill")).to_have_text("ready")
    until(lambda: len(_ready(seen)) == 2)


def test_changes_need_the_key_and_a_pipeline(seen: Running) -> None:
    url = f"{seen.url}/debug/pipelines/other/drain"
    assert httpx.post(url, timeout=30).status_code == 401
    answer = httpx.post(url, headers=HEADERS, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "pipeline_not_found")


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_is_wider_than_the_window_in_light_and_dark(
    width: int, browser: Browser, seen: Running
) -> None:
    shape = {"viewport": {"width": width, "height": 800}, "color_scheme": "dark"}
    url = f"{seen.url}/console"
    with visiting(browser, url, reduced_motion="reduce", **shape) as visit:
        visit.use_key(KEY)
        visit.until_status("ready")
        visit.send("the quick", max_tokens="60")
        visit.until_ended()
        overflow = "() => document.documentElement.scrollWidth - innerWidth"
        assert visit.page.evaluate(overflow) <= 0
        ground = "() => getComputedStyle(document.body).backgroundColor"
        dark = visit.page.evaluate(ground)
        assert visit.page.evaluate("() => document.getAnimations().length") == 0
        visit.page.get_by_role("link", name="Operations").click()
        visit.page.locator(".pipeline").first.wait_for()
        assert visit.page.evaluate(overflow) <= 0
        visit.page.get_by_role("button", name="Theme").click()
        light = visit.page.evaluate(ground)
        assert sum(_channels(dark)) < 100 < 600 < sum(_channels(light))
        visit.page.reload()
        assert visit.page.evaluate(ground) == light, "the choice is kept"


def _channels(colour: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", colour)]


def test_the_keyboard_reaches_every_control_in_the_order_of_the_page(visit: Visit) -> None:
    page = visit.page
    page.reload()
    visit.until_status("ready")
    focused = "() => { const e = document.activeElement; return e.id || e.name || e.textContent; }"
    reached = []
    while len(reached) < 30 and "steps" not in reached:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focused))
    assert reached == [
        *("Skip to the prompt", "to-playground", "to-operations", "API", "key", "Use", "theme"),
        *("kind", "prompt", "send", "compare", "clear", "Settings", "mode", "controller"),
        *("temperature", "max_tokens", "seed", "structure", "transcript", "steps"),
    ]
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("#playground :is(input, select, textarea), #key")]
            .filter((e) => !e.labels?.length && !e.ariaLabel).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_the_api_is_described_without_other_hosts(browser: Browser, seen: Running) -> None:
    with visiting(browser, f"{seen.url}/docs") as visit:
        visit.page.get_by_text("Failed to load API definition").wait_for()
        visit.page.evaluate("key => sessionStorage.setItem('eesd-key', key)", KEY)
        visit.page.reload()
        visit.page.locator(".opblock").first.wait_for()
        paths = visit.page.locator(".opblock-summary-path").all_text_contents()
        assert {"/v1/completions", "/debug/state"} <= {p.replace("\u200b", "") for p in paths}
        assert set(visit.complaints) == {UNAUTHORIZED}
