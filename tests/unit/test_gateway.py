"""infra/gateway/nginx.conf in front of the API, with the distribution's nginx."""

import asyncio
import getpass
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from serve_app.config import LimitsConfig
from serve_app.openai.api_settings import limits_of
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

CONFIG = Path(__file__).parents[2] / "infra" / "gateway" / "nginx.conf"
LIMITS = limits_of(LimitsConfig(), max_model_len=2048, max_running=32)

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None or shutil.which("openssl") is None,
    reason="needs nginx and openssl (apt-get install nginx openssl)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    port: int
    engine: ToyEngine

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=False, timeout=20)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    engine = ToyEngine(delay_s=0.05)
    app = toy_api(engine, max_model_len=2048, limits=LIMITS)
    words = (
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -keyout server.key -out server.crt"
    )
    subprocess.run(words.split(), cwd=tmp_path, check=True, capture_output=True)
    with serving(app) as url:
        port = _free_port()
        _write(tmp_path / "nginx.conf", port=port, service=urlsplit(url).netloc)
        command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
        with subprocess.Popen([*command, "-g", "daemon off;"]) as process:
            try:
                _wait_for(port, process)
                yield Gateway(port=port, engine=engine)
            finally:
                process.terminate()


def _write(file: Path, *, port: int, service: str) -> None:
    """The shipped file with this test's ports, shorter times, and folders that it may write to."""
    text = CONFIG.read_text()
    for old, new in {
        "listen 8443 ssl": f"listen 127.0.0.1:{port} ssl",
        "server 127.0.0.1:8000": f"server {service}",
        "client_header_timeout 20s": "client_header_timeout 1s",
        "client_body_timeout 20s": "client_body_timeout 1s",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folders = "".join(
        f"    {kind}_temp_path {file.parent}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # Started as root, its workers would be another user, which may not write to the folders.
    user = f"user {getpass.getuser()};\n" if os.getuid() == 0 else ""
    file.write_text(user + text.replace("http {\n", "http {\n" + folders, 1))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        assert process.poll() is None, "nginx has ended"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("nginx does not listen")


def test_requests_and_streams_pass(gateway: Gateway) -> None:
    with gateway.client as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "toy"
        body = {"prompt": "x", "max_tokens": 30, "stream": True}
        arrived_s = []
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line:
                    arrived_s.append(time.monotonic())
        assert arrived_s[-1] - arrived_s[0] > 0.3, "tokens are sent on as they come"


def test_what_is_for_operators_stays_inside(gateway: Gateway) -> None:
    with gateway.client as client:
        for path in ("/metrics", "/health", "/debug/rounds", "/-/routes", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 404, path


def test_a_body_that_the_service_would_refuse_is_refused_here(gateway: Gateway) -> None:
    with gateway.client as client:
        limit = LIMITS.max_body_bytes
        fits = client.post("/v1/completions", content=b" " * limit)
        assert fits.json()["error"]["type"] == "invalid_request_error"
        over = client.post("/v1/completions", content=b" " * (limit + 1))
        assert (over.status_code, over.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "started",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost:",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_end_does_not_reach_the_service(
    gateway: Gateway, started: bytes
) -> None:
    async def rest() -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)
        writer.write(started)
        received = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return received

    assert asyncio.run(rest()).split(b" ")[1:2] in ([], [b"408"])
    assert gateway.engine.requests == []


def test_a_client_that_sends_too_often_is_told_so(gateway: Gateway) -> None:
    body = {"prompt": "x"}
    with gateway.client as client:
        answers = [client.post("/tokenize", json=body) for _ in range(300)]
    rejections = [answer for answer in answers if answer.status_code == 429]
    assert 0 < len(rejections) <= 200
    assert answers[0].status_code == 200
    assert rejections[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert rejections[0].headers["retry-after"] == "1"
