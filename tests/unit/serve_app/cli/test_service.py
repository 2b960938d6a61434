"""`eesd controllers` and `eesd pipelines` reading whatever may answer at a URL."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from serve_app.cli.main import main
from serve_app.service.connection_file import connection_file_for
from serve_app.service.waiting import ChangedReason

_STATE = '{"default": {}, "pinned": false, "workloads": {}, "pipelines": []}'


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Says whatever its `answer` is, with its `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.end_headers()
            self.wfile.write(self.server.answer)  # type: ignore[attr-defined]

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_options_before_and_behind_an_action_count_and_the_latter_win(
    server: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.answer = 200, _STATE.encode()  # type: ignore[attr-defined]
    at, nowhere = f"--url=http://127.0.0.1:{server.server_port}", "--url=http://127.0.0.1:1"
    for words in (
        [at, "--json"],
        [at, "--json", "show"],
        ["show", at, "--json"],
        [nowhere, "--json", "show", at],
    ):
        assert main(["controllers", *words]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(_STATE)
    assert main(["controllers", at, "show", nowhere]) == 1


@pytest.mark.parametrize(
    "words", [["controllers", "--json"], ["pipelines", "--json"], ["trace", "--json"]]
)
def test_the_only_service_of_this_user_is_read_whatever_its_port(
    words: list[str],
    server: HTTPServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
    page = {**json.loads(_STATE), "starting": [], "traces": []}
    server.status, server.answer = 200, json.dumps(page).encode()  # type: ignore[attr-defined]
    port = server.server_port
    with connection_file_for(port, address=f"127.0.0.1:{port}"):
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out) in (page, [])
        with connection_file_for(port - 1, address=f"127.0.0.1:{port}"):
            assert main(words) == 2
        assert f"on ports {port - 1}, {port}: name one with" in capsys.readouterr().err


def test_a_proxy_is_for_other_hosts_alone(
    server: HTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status, server.answer = 200, _STATE.encode()  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{server.server_port}"
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert main(["controllers", "--url", url, "--json"]) == 0
    assert main(["wait", "--port", str(server.server_port), "--timeout-s", "1"]) == 0
    monkeypatch.setenv("http_proxy", url)
    capsys.readouterr()
    assert main(["controllers", "--url", "http://service.example", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(_STATE)


def test_pipelines_are_a_table_or_json(
    server: HTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pipeline = {
        **{"pipeline": "p1", "pid": 7, "unavailable": "a rank died"},
        **{"epoch": 3, "num_live": 2, "weight": None, "draining": ""},
        "kv_cache": {"num_tokens": 22528, "rank_bytes": {"verify rank 0": 512 * 2**20}},
        "workers": [{"name": "verify rank 0"}],
    }
    page = {
        "pipelines": [pipeline],
        "starting": [{"pipeline": "p2", "reason": "verify rank 0 needs GPU 1"}],
        "fleet": {
            **{"wanted": 2, "min_count": 1, "max_count": 4, "num_ready": 1, "num_starting": 1},
            **{"num_draining": 0, "num_waiting": 3, "since_s": 12.0, "reason": "up from 1 to 2"},
        },
        "refused_settings": "user_config: log_level: found 'LOUD'",
    }
    server.status, server.answer = 200, json.dumps(page).encode()  # type: ignore[attr-defined]
    port = str(server.server_port)
    assert main(["pipelines", "--port", port, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == page
    assert main(["pipelines", "--port", port, "list"]) == 0
    table = capsys.readouterr().out
    assert "p1" in table
    assert "a rank died" in table
    assert "not measured" in table
    assert "22528 (512 MiB a rank)" in table
    assert "p2: verify rank 0 needs GPU 1" in table
    assert "wanted 2 of 1 to 4 (ready 1, starting 1, draining 0, 3 requests wait)" in table
    assert "for 12 s: up from 1 to 2" in table
    assert "not applied: user_config: log_level: found 'LOUD'" in table


def test_waiting_ends_with_health_or_says_what_it_waited_for(
    server: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["wait", "--port", str(server.server_port), "--timeout-s", "1.5"]
    refusal = {"error": {"message": "pipeline p: starting for 3 s: verify rank 0 needs GPU 1"}}
    server.status, server.answer = 503, json.dumps(refusal).encode()  # type: ignore[attr-defined]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert printed.out.count("verify rank 0 needs GPU 1") == 1, "only what has changed is said"
    assert "not healthy after 1.5 s: pipeline p: starting" in printed.err
    server.status, server.answer = 404, b"Path '/health' not found."  # type: ignore[attr-defined]
    assert main(words) == 1
    assert "the application is not deployed yet" in capsys.readouterr().out
    server.status, server.answer = 200, b""  # type: ignore[attr-defined]
    assert main(words) == 0
    assert "healthy: http://127.0.0.1:" in capsys.readouterr().out


def test_waiting_for_a_service_that_is_not_there_yet_is_no_error_before_the_timeout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["wait", "--url", "http://127.0.0.1:1", "--timeout-s", "0.5"]) == 1
    printed = capsys.readouterr()
    assert "its HTTP proxy does not run yet" in printed.out
    assert main(["wait", "--url", "nonsense://["]) == 1
    assert "look at --url" in capsys.readouterr().err


def test_reasons_that_differ_only_in_numbers_are_said_once() -> None:
    lines: list[str] = []
    tell = ChangedReason(lines.append)
    for reason in ("loading 3 %, 1.5 s", "loading 4 %, 2 s", "", "loading 4 %, 2 s", "ready"):
        tell(reason)
    assert lines == ["loading 3 %, 1.5 s", "loading 4 %, 2 s", "ready"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, "<html>hello</html>"),
        (200, "{}"),
        (200, "[]"),
        (200, '{"default": "x"}'),
        (200, _STATE),
        (404, "nothing here"),
    ],
)
def test_another_server_is_told_apart_in_one_line(
    status: int, answer: str, server: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.answer = status, answer.encode()  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{server.server_port}"
    assert main(["controllers", "--url", url]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"eesd: {url} answers, but is no eesd service of this version")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("answer", "message"),
    [('{"error": {"message": "wrong key"}}', "wrong key"), ("<html>", "Unauthorized")],
)
def test_a_refusal_is_passed_on(
    answer: str, message: str, server: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.answer = 401, answer.encode()  # type: ignore[attr-defined]
    assert main(["controllers", "--url", f"http://127.0.0.1:{server.server_port}"]) == 1
    assert f"HTTP 401: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nonsense", "http://[", "http://127.0.0.1:1"])
def test_an_address_without_an_answer_is_one_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["controllers", "--url", url]) == 1
    assert "is the service running there?" in capsys.readouterr().err
