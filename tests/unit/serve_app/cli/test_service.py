"""`eesd controllers` and `eesd pipelines` reading whatever may answer at a URL."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from serve_app.cli.main import main

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


def test_pipelines_are_a_table_or_a_json_list(
    server: HTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pipeline = {
        **{"pipeline": "p1", "pid": 7, "is_ready": False, "last_trouble": "a rank died"},
        **{"epoch": 3, "num_live": 2, "weight": None, "draining": ""},
        "kv_cache": {"num_tokens": 22528, "rank_bytes": {"verify rank 0": 512 * 2**20}},
    }
    answer = json.dumps({"pipelines": [pipeline]})
    server.status, server.answer = 200, answer.encode()  # type: ignore[attr-defined]
    port = str(server.server_port)
    assert main(["pipelines", "--port", port, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [pipeline]
    assert main(["pipelines", "--port", port, "list"]) == 0
    table = capsys.readouterr().out
    assert "p1" in table
    assert "a rank died" in table
    assert "not measured" in table
    assert "22528 (512 MiB a rank)" in table


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
    ("answer", "said"),
    [('{"error": {"message": "wrong key"}}', "wrong key"), ("<html>", "Unauthorized")],
)
def test_a_refusal_is_passed_on(
    answer: str, said: str, server: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.answer = 401, answer.encode()  # type: ignore[attr-defined]
    assert main(["controllers", "--url", f"http://127.0.0.1:{server.server_port}"]) == 1
    assert f"HTTP 401: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nonsense", "http://[", "http://127.0.0.1:1"])
def test_an_address_without_an_answer_is_one_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["controllers", "--url", url]) == 1
    assert "is the service running there?" in capsys.readouterr().err
