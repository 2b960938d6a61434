"""What Serve runs around the application dies, and clients lose at most their connection."""

import asyncio
import time
from collections.abc import Callable

import httpx
from psutil import NoSuchProcess, Process

from eesd_dist.bench.load_client import Listener, Streamed, stream
from tests.support.running import Running, descendants, until

_BODY = {
    "prompt": "the log",
    "seed": 6,
    "temperature": 0.9,
    "max_tokens": 300,
    "stream": True,
    "return_token_ids": True,
    "ignore_eos": True,
}
_EARLY = 20


def _processes(name: str) -> list[Process]:
    return [p for p in descendants() if _title(p).startswith(f"ray::{name}")]


def _title(process: Process) -> str:
    try:
        return " ".join(process.cmdline())
    except NoSuchProcess:
        return ""


def _streamed(service: Running, *, meanwhile: Callable[[], object] = lambda: None) -> Streamed:
    """Reads a stream as a client that goes on when its connection breaks."""

    async def read() -> Streamed:
        listener = Listener("stream")
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
            reading = asyncio.ensure_future(stream(client, listener, _BODY, max_attempts=200))
            while len(listener.heard().tokens) < _EARLY and not reading.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            meanwhile()
            await reading
        return listener.heard()

    streamed = asyncio.run(read())
    assert streamed.is_complete, streamed.error
    return streamed


def test_streams_and_requests_do_without_serves_controller(service: Running) -> None:
    undisturbed = _streamed(service)
    (before,) = _processes("ServeController")
    streamed = _streamed(service, meanwhile=before.kill)
    assert (streamed.tokens, streamed.num_resumed) == (undisturbed.tokens, 0)
    assert _streamed(service).tokens == undisturbed.tokens
    # Ray starts another process some time after it has noticed that this one is gone.
    (after,) = until(lambda: _processes("ServeController"), timeout_s=60)
    assert after.pid != before.pid
    until(lambda: service.state().is_ready, timeout_s=60)


def test_a_killed_proxy_is_replaced_and_its_stream_continues(service: Running) -> None:
    undisturbed = _streamed(service)
    before = service.state()
    began_s = time.monotonic()
    (proxy,) = _processes("ProxyActor")
    streamed = _streamed(service, meanwhile=proxy.kill)
    assert streamed.tokens == undisturbed.tokens
    assert streamed.num_resumed == 1
    assert service.state().epoch == before.epoch
    assert time.monotonic() - began_s < 60
    print(f"longest pause {streamed.longest_pause_s:.1f} s")  # noqa: T201
