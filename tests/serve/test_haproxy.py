"""The service behind HAProxy, which Serve starts in the place of its own HTTP proxies."""

import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from psutil import NoSuchProcess, Process

from cluster.ray_compat import HAPROXY
from serve_app.service.watchdog import running_after
from tests.support.http_streams import streamed
from tests.support.running import descendants, free_port, until
from tests.support.served import command, wait_for_line

pytestmark = pytest.mark.timeout(400)

_PAUSE_S = 3
"""Longest pause of a client, in seconds."""
_WEBSOCKET = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
)


@dataclass(frozen=True, kw_only=True)
class _Service:
    url: str
    port: int
    process_id: int

    def haproxy(self) -> Process:
        """Waits while a new process takes over from the one before."""
        (process,) = until(self._only_haproxy, timeout_s=30)
        return process

    def _only_haproxy(self) -> list[Process]:
        haproxies = [process for process in descendants(self.process_id) if _is_haproxy(process)]
        return haproxies if len(haproxies) == 1 else []


def _is_haproxy(process: Process) -> bool:
    with suppress(NoSuchProcess):
        return bool(process.name() == "haproxy")
    return False


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short name of a folder for Ray's files."""
    name = Path(f"/tmp/h{free_port()}")
    name.mkdir()
    yield name
    shutil.rmtree(name, ignore_errors=True)


@pytest.fixture(scope="module")
def service(tiny_service: Path, folder: Path) -> Iterator[_Service]:
    port = free_port()
    env = {HAPROXY: "1", "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(_PAUSE_S)}
    words = ("serve", "--model", str(tiny_service), "--port", str(port))
    words = (*words, "--set", "limits.max_body_bytes=4096")
    with command(*words, env={**env, "TMPDIR": str(folder)}) as (process, lines):
        wait_for_line(lines, "Ctrl-C stops", process)
        yield _Service(url=f"http://127.0.0.1:{port}", port=port, process_id=process.pid)
        family = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, "".join(lines)
    assert not running_after(family, wait_s=1.0)
    assert not list(folder.iterdir())


def _answer(service: _Service, data: bytes) -> bytes:
    """Returns what is answered, to the end of the connection or of an error."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        while not answer.endswith(b"}}") and (received := connection.recv(65536)):
            answer += received
    return answer


def test_haproxy_listens_and_its_files_are_in_the_private_folder(
    service: _Service, folder: Path
) -> None:
    haproxy = service.haproxy()
    sockets = haproxy.net_connections()
    assert service.port in {socket.laddr.port for socket in sockets if socket.status == "LISTEN"}
    (config,) = folder.glob("*/h/*/haproxy.cfg")
    assert str(config) in haproxy.cmdline()
    assert config.parents[2].stat().st_mode & 0o077 == 0


def test_a_killed_haproxy_is_replaced_and_its_stream_continues(service: _Service) -> None:
    undisturbed = streamed(service.url)
    assert undisturbed.num_resumed == 0
    disturbed = streamed(service.url, meanwhile=service.haproxy().kill)
    assert disturbed.tokens == undisturbed.tokens
    assert disturbed.num_resumed == 1


def test_a_killed_manager_of_haproxy_is_replaced_with_it(service: _Service) -> None:
    before = service.haproxy()
    manager = before.parent()
    assert manager is not None
    assert "HAProxyManager" in " ".join(manager.cmdline())
    manager.kill()

    def is_replaced() -> bool:
        with suppress(httpx.HTTPError):
            is_served = httpx.get(f"{service.url}/ping").status_code == 200
            return is_served and not before.is_running() and bool(service._only_haproxy())
        return False

    until(is_replaced, timeout_s=60)


def test_a_host_that_haproxy_would_not_reach_is_refused(tiny_service: Path) -> None:
    words = ("serve", "--model", str(tiny_service), "--host", "::1")
    with command(*words, env={HAPROXY: "1"}) as (process, lines):
        assert process.wait(60) == 2
    assert "expected one of 127.0.0.1, localhost, 0.0.0.0" in lines[-1]


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        (b"Content-Encoding: gzip", 415, b"gzip"),
        (b"X-Request-Id: \xff", 400, b"not UTF-8"),
        (b"X-Request-Id: a b", 400, b"x-request-id: expected 1 to 128 printable"),
        (_WEBSOCKET, 400, b"WebSockets are not served"),
        (b"Content-Length: 5000", 413, b"4096"),
    ],
    ids=["coding", "no text", "request id", "websocket", "long body"],
)
def test_heads_are_refused_by_the_ingress(
    service: _Service, line: bytes, status: int, reason: bytes
) -> None:
    begin = b"GET" if line == _WEBSOCKET else b"POST"
    head = begin + b" /v1/completions HTTP/1.1\r\nHost: x\r\n" + line
    head += b"" if line == _WEBSOCKET else b"\r\nConnection: close"
    answer = _answer(service, head + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'{"error":{"message":' in answer
    assert reason in answer


def test_headers_that_serve_acts_on_do_not_reach_it(service: _Service) -> None:
    headers = {"X-Request-Timeout-Seconds": "0.000001", "X-Request-Disconnect-Disabled": "?1"}
    assert httpx.get(f"{service.url}/ping", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"GET /ping HT", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"],
    ids=["head", "body"],
)
def test_a_request_that_pauses_is_ended(service: _Service, data: bytes) -> None:
    began_s = time.monotonic()
    assert _answer(service, data).startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))
    assert time.monotonic() - began_s < _PAUSE_S + 5


def test_the_end_of_a_client_ends_its_request(service: _Service) -> None:
    def has_left() -> bool:
        lines = httpx.get(f"{service.url}/metrics").text.splitlines()
        labels = ("http_requests_total", 'path="/v1/chat/completions"', 'status="499"')
        return any(all(label in line for label in labels) for line in lines)

    assert not has_left()
    messages = [{"role": "user", "content": "the log"}]
    body = {"messages": messages, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    url = f"{service.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        next(answer.iter_bytes())
    until(has_left, timeout_s=20)
