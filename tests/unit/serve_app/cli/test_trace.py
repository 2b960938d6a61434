"""`eesd trace`: traces as text, and as a file for Perfetto."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from rich.console import Console

from serve_app.cli.main import main
from serve_app.cli.trace import perfetto_of, waterfall
from tests.support.live_server import serving


def span(name: str, begin_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "trace_id": "t",
        "span_id": name,
        "parent_id": None,
        "start": 1000.0 + begin_ms / 1e3,
        "end": 1000.0 + end_ms / 1e3,
        "process": "ingress",
        "attributes": {},
        **more,
    }


TRACE = {
    "request_id": "mine",
    "spans": [
        span("POST /v1/completions", 0, 100, attributes={"http.response.status_code": 200}),
        span(
            "chat tiny",
            2,
            98,
            parent_id="POST /v1/completions",
            attributes={"gen_ai.usage.output_tokens": 7, "eesd.draft.tokens": 9},
        ),
        span(
            "eesd.round",
            25,
            75,
            parent_id="chat tiny",
            process="drafting actor",
            attributes={"eesd.draft.tokens": 3},
        ),
        span("eesd.verify", 30, 70, parent_id="eesd.round", process="drafting actor"),
    ],
}


def shown(trace: dict[str, Any], *, with_stages: bool, width: int = 120) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width)
    for line in waterfall(trace, with_stages=with_stages, width=width):
        console.print(line)
    return out.getvalue().splitlines()


def test_a_waterfall_has_a_bar_where_a_span_was() -> None:
    totals, _, *rows = shown(TRACE, with_stages=True)
    assert totals == "mine  100.0 ms  status 200, output tokens 7, drafted 9"
    assert [row.split()[0] for row in rows] == ["POST", "chat", "eesd.round", "eesd.verify"]
    whole, _, a_round, verify = rows
    first = whole.index("█")
    assert whole.count("█") == 40
    assert (a_round.index("█") - first, a_round.count("█")) == (10, 20)
    assert (verify.index("█") - first, verify.count("█")) == (12, 16)
    assert verify.startswith("      eesd.verify")
    assert verify.split()[-4:] == ["30.0", "40.0", "drafting", "actor"]


def test_stages_of_rounds_are_shown_when_they_are_asked_for() -> None:
    assert not any("eesd.verify" in row for row in shown(TRACE, with_stages=False))
    assert len(shown(TRACE, with_stages=False)) == 5


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_narrow_terminal_shows_whole_names_and_times(width: int) -> None:
    *_, verify = shown(TRACE, with_stages=True, width=width)
    assert verify.startswith("      eesd.verify ")
    assert "30.0" in verify
    assert "40.0" in verify
    assert verify.count("█") >= 4
    assert len(verify) <= max(width, 70)


def test_a_span_without_length_at_the_end_has_a_bar_too() -> None:
    instant = {"request_id": "", "spans": [span("a", 0, 50), span("b", 50, 50)]}
    assert shown(instant, with_stages=True)[-1].count("█") == 1
    assert shown({"request_id": "", "spans": [span("a", 3, 3)]}, with_stages=True)


def test_spans_of_a_perfetto_track_contain_each_other_or_are_apart() -> None:
    overlapping = [span("a", 0, 60), span("b", 10, 20), span("c", 30, 80), span("d", 90, 95)]
    events = perfetto_of([{"spans": overlapping}, {"spans": [span("e", 50, 55, process="x")]}])
    spans = [event for event in events["traceEvents"] if event["ph"] == "X"]  # type: ignore[attr-defined]
    assert {event["name"]: (event["pid"], event["tid"]) for event in spans} == {
        "a": (1, 1),
        "b": (1, 1),
        "c": (1, 2),
        "d": (1, 1),
        "e": (2, 1),
    }
    (c,) = [event for event in spans if event["name"] == "c"]
    assert (c["ts"], c["dur"]) == (pytest.approx(1_000_030_000), pytest.approx(50_000))
    processes = {
        event["pid"]: event["args"]["name"] for event in events["traceEvents"] if event["ph"] == "M"
    }  # type: ignore[attr-defined]
    assert processes == {1: "ingress", 2: "x"}


@pytest.fixture
def url() -> Iterator[str]:
    app = FastAPI()

    @app.get("/debug/traces")
    def latest(limit: int) -> dict[str, Any]:
        return {"traces": [TRACE | {"request_id": f"latest {n}"} for n in range(min(limit, 2))]}

    @app.get("/debug/traces/{request_id:path}")
    def one(request_id: str) -> dict[str, Any]:
        if request_id != "a/b":
            raise HTTPException(404)
        return TRACE

    with serving(app) as url:
        yield url


def test_the_latest_request_is_last(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--url", url, "--limit", "5"]) == 0
    out = capsys.readouterr().out
    assert out.index("latest 1") < out.index("latest 0")


def test_one_is_found_by_its_id(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "a/b", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [TRACE]
    assert main(["trace", "other", "--url", url]) == 1
    assert "no trace of a request other" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--url", url, "--perfetto", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    file = tmp_path / "trace.json"
    assert main(["trace", "--url", url, "--perfetto", str(file)]) == 0
    assert len(json.loads(file.read_text())["traceEvents"]) == 2 + 4
