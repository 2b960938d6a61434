"""`eesd bench online` against the whole API over a toy engine."""

import asyncio
from dataclasses import asdict

import pytest

from eesd_dist.bench.load_client import ask_all
from eesd_dist.bench.online import run, summarise
from eesd_dist.errors import EngineError
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.unit.telemetry.rounds import a_round

BODIES = [{"prompt": f"the dog {number}"} for number in range(6)]


def test_every_load_runs_with_speculation_off_and_on() -> None:
    app = toy_api(ToyEngine(), max_model_len=500)
    app.add_api_route("/debug/rounds", lambda: {"rounds": [asdict(a_round(waited_s=0.02))]})
    lines: list[str] = []
    with serving(app) as url:
        report = asyncio.run(
            run(url, BODIES, loads=(1, 2), per_load=3, max_tokens=8, seed=1, say=lines.append)
        )
    assert [(row["load"], row["speculation"], row["requests"]) for row in report["rows"]] == [
        *((1, "off", 3), (1, "auto", 3), (2, "off", 4), (2, "auto", 4)),
    ]
    assert all(row["tokens"] == 8 * row["requests"] for row in report["rows"])
    assert report["rounds"]["verify"] > 0.0
    assert set(summarise(report)["tokens_per_s_on_over_off"]) == {1, 2}
    assert len(lines) == 4


def test_fewer_prompts_than_six_are_timed_alone_without_the_other_mode() -> None:
    app = toy_api(ToyEngine(), max_model_len=500)
    warm_up = asdict(a_round(request_ids=("warm", "up"), waited_s=9.0))
    latest = asdict(a_round(request_ids=("one", "two"), waited_s=0.02))
    app.add_api_route("/debug/rounds", lambda: {"rounds": [warm_up, warm_up, latest]})
    with serving(app) as url:
        report = asyncio.run(
            run(url, BODIES[:2], loads=(1,), per_load=1, max_tokens=8, seed=1, say=lambda _: None)
        )
    assert report["alone"]["off"]["verify"] + report["alone"]["off"]["transfer"] < 100.0


def test_a_request_that_fails_ends_the_run_with_the_services_message() -> None:
    engine = ToyEngine()
    engine.breaks_after = 2
    with serving(toy_api(engine, max_model_len=500)) as url, pytest.raises(EngineError):
        asyncio.run(
            run(url, BODIES, loads=(1,), per_load=1, max_tokens=8, seed=1, say=lambda _: None)
        )


def test_a_closed_loop_keeps_the_order_and_the_number_of_requests_at_a_time() -> None:
    engine = ToyEngine(delay_s=0.01)
    bodies = [
        {
            "prompt": "x",
            "model": "toy",
            "max_tokens": number + 1,
            "stream": True,
            "return_token_ids": True,
            "request_id": f"request-{number}",
        }
        for number in range(6)
    ]
    with serving(toy_api(engine, max_model_len=500)) as url:
        streams = asyncio.run(ask_all(url, bodies, concurrency=2))
    assert [(stream.name, len(stream.tokens)) for stream in streams] == [
        (f"request-{number}", number + 1) for number in range(6)
    ]
    assert engine.max_live <= 2
