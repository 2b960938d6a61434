"""`eesd controllers` looking at whatever may answer at a URL."""

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
def test_where_nobody_answers_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["controllers", "--url", url]) == 1
    assert "is the service running there?" in capsys.readouterr().err
