"""Clients that leave, however Serve tells it and whatever the service is doing: no error, 499."""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from ray.exceptions import TaskCancelledError
from ray.serve.exceptions import RequestCancelledError
from starlette.types import Message

from eesd_dist.routing.quotas import Standing
from eesd_dist.telemetry import names
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.telemetry.tracing_options import TracingOptions
from serve_app.openai.keys import ApiKey, KeyRing, Permit
from serve_app.openai.middleware.http_metrics import HttpMetrics
from tests.support.spans import read_spans
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

_PATH = "/v1/completions"
_PAUSE_S = 0.05

Departure = Callable[[], Exception | None]
_DEPARTURES: dict[str, Departure | None] = {
    "a disconnect": lambda: None,
    "a cancelled call of Ray": TaskCancelledError,
    "a cancelled request of Serve": lambda: RequestCancelledError("r"),
    "a cancelled task": None,
}
_POINTS = {
    "in its body": {},
    "waiting for a permit": {},
    "before the first token": {"stream": True},
    "in a stream": {"stream": True},
    "before an answer": {},
}


class _Quotas:
    """Gives permits, or keeps the request waiting until its calls are cancelled with it."""

    def __init__(self, left: asyncio.Event, departure: Departure | None, *, waits: bool) -> None:
        self._left, self._departure, self._waits = left, departure, waits
        self.num_held = 0

    async def acquire(self, key: ApiKey, permit: str) -> Standing:
        if self._waits:
            await self._left.wait()
            error = self._departure and self._departure()
            if error is not None:
                raise error
        self.num_held += 1
        return Standing(refusal=None, num_running=1, num_tokens_left=1, wait_s=0.0)

    async def reserve(self, permit: Permit, num_tokens: int) -> Standing:
        return Standing(refusal=None, num_running=1, num_tokens_left=1, wait_s=0.0)

    def release(self, permit: Permit) -> None:
        self.num_held -= 1


class _Client:
    """Sends a request to an application as Serve does, and leaves."""

    def __init__(self, point: str, departure: Departure | None) -> None:
        self._point, self._departure = point, departure
        self.left = asyncio.Event()
        self._has_sent = False
        self.statuses: list[int] = []

    async def receive(self) -> Message:
        if not self._has_sent:
            self._has_sent = True
            body = {"prompt": "x", "max_tokens": 50, **_POINTS[self._point]}
            is_cut = self._point == "in its body"
            content = json.dumps(body).encode()
            return {"type": "http.request", "body": content, "more_body": is_cut}
        await self.left.wait()
        error = self._departure and self._departure()
        if error is not None:
            raise error
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])

    async def leaves(self, app: FastAPI, *, after_steps: int | None = None) -> None:
        """Leaves after a while, or after so many steps of the event loop."""
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": _PATH,
            "query_string": b"",
            "headers": [
                (b"host", b"x"),
                (b"authorization", b"Bearer k"),
                (b"content-type", b"application/json"),
                (b"transfer-encoding", b"chunked"),
            ],
        }
        answering = asyncio.ensure_future(app(scope, self.receive, self.send))
        if after_steps is None:
            await asyncio.sleep(_PAUSE_S)
        for _ in range(after_steps or 0):
            await asyncio.sleep(0)
        self.left.set()
        if self._departure is None:
            answering.cancel()
        await asyncio.wait([answering], timeout=5)
        assert answering.done()
        assert answering.cancelled() == (self._departure is None)
        if self._departure is not None:
            answering.result()  # no error for a server to log


@pytest.mark.parametrize("point", _POINTS)
@pytest.mark.parametrize("departure", _DEPARTURES)
def test_a_client_that_leaves_is_no_error(
    point: str, departure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tracing = make_tracing(TracingOptions(folder=str(tmp_path)), process="ingress")
    asyncio.run(_left(point, _DEPARTURES[departure], tracing))
    tracing.close()
    # Leases of toy workers of other tests run down in threads of this process.
    records = [r for r in caplog.records if not r.name.startswith("eesd_dist.workers")]
    assert [record.levelname for record in records if record.levelno > logging.INFO] == []
    lines = [record.getMessage() for record in caplog.records if "POST" in record.getMessage()]
    assert len(lines) == 1
    assert "status=499" in lines[0]
    (span,) = [span for span in read_spans(tmp_path) if names.HTTP_METHOD in span.attributes]
    assert span.attributes["eesd.request.client_left"] is True
    assert span.attributes[names.HTTP_STATUS] == 499
    assert span.status == {}
    assert "error.type" not in span.attributes


@pytest.mark.parametrize("point", ["in a stream", "before an answer"])
@pytest.mark.parametrize("departure", _DEPARTURES)
def test_a_client_may_leave_at_any_step(point: str, departure: str) -> None:
    async def leave() -> None:
        for steps in range(1, 12):
            await _left(point, _DEPARTURES[departure], Tracing(), after_steps=steps)

    asyncio.run(leave())


async def _left(
    point: str, departure: Departure | None, tracing: Tracing, *, after_steps: int | None = None
) -> None:
    client, metrics = _Client(point, departure), HttpMetrics(ingress="a")
    quotas = _Quotas(client.left, departure, waits=point == "waiting for a permit")
    engine = ToyEngine(delay_s=math.inf if point == "before the first token" else 0.0)
    engine.stalls_after = 3
    key = ApiKey(name="k", sha256=hashlib.sha256(b"k").hexdigest(), max_concurrent_requests=1)
    app = toy_api(
        engine,
        max_model_len=100,
        keys=KeyRing(key),
        quotas=quotas,
        tracing=tracing,
        http_metrics=metrics,
        departures=(TaskCancelledError, RequestCancelledError),
    )
    await client.leaves(app, after_steps=after_steps)
    samples = [
        line.partition("{")[2]
        for line in metrics.page().decode().splitlines()
        if line.startswith(("eesd_http_requests_total{", "eesd_http_refused_requests_total{"))
    ]
    assert samples == [f'ingress="a",path="{_PATH}",status="499"}} 1.0']
    assert set(client.statuses) <= {200, 499}
    assert (quotas.num_held, engine.num_live) == (0, 0)
