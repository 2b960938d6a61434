"""The front is no single point: HTTP proxies on two hosts, and a head that dies and returns."""

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from eesd_dist.bench.load_client import Listener, Streamed, stream
from tests.support.hosts import Hosts
from tests.support.ray_hosts import PORT, HostsService, RayHosts
from tests.support.running import until

_HEAD, *_FRONTS = range(3)
_BODY = {
    "model": "tiny",
    "prompt": "the lazy dog",
    "seed": 6,
    "temperature": 1.0,
    "max_tokens": 400,
    "stream": True,
    "return_token_ids": True,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
_EARLY = 20
"""Tokens of a stream that arrive before a failure is injected."""


@pytest.fixture(scope="module")
def ray_hosts() -> Iterator[RayHosts]:
    """Host 0 has the head and nothing else; the others have all replicas and workers."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server: apt install redis-server")
    hosts = Hosts(3, prefix="eesdf", subnet="10.77.13")
    room = {"room": 10.0}
    with hosts, RayHosts(hosts, resources={1: room, 2: room}, redis_on=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fronts(ray_hosts: RayHosts, tiny_model: Path) -> Iterator[HostsService]:
    tree = {
        "engine": {
            "model": {"path": str(tiny_model), "dtype": "float32", "device": "cpu"},
            "cache": {"num_pages": 256},
        },
        "model_name": "tiny",
        "num_ingresses": 2,
        "proxy_location": "EveryNode",
        "placement": {
            "draft": {"resources": {"room": 0.1}},
            "verify": {"resources": {"room": 0.1}},
            "front": {"room": 0.001},
        },
    }
    with ray_hosts.service(tree, listens_at="0.0.0.0") as service:
        for host in _FRONTS:
            until(lambda host=host: _is_front(service.hosts, host), timeout_s=60)  # type: ignore[misc]
        yield service


def _url(hosts: Hosts, host: int) -> str:
    return f"http://{hosts.address(host)}:{PORT}"


def _is_front(hosts: Hosts, host: int) -> bool:
    try:
        return httpx.get(f"{_url(hosts, host)}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def _proxy_of(hosts: Hosts, host: int) -> psutil.Process:
    processes = [psutil.Process(pid) for pid in hosts.pids(host)]
    (proxy,) = [p for p in processes if "ProxyActor" in " ".join(p.cmdline())]
    return proxy


class _InTurn(httpx.AsyncBaseTransport):
    """Sends each request to the first of some hosts that accepts the connection."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._transport = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        errors = []
        for url in self._urls:
            request.url = request.url.copy_with(host=url.host, port=url.port)
            try:
                return await self._transport.handle_async_request(request)
            except httpx.ConnectError as error:
                errors.append(error)
        raise errors[-1]

    async def aclose(self) -> None:
        await self._transport.aclose()


def _streamed(
    hosts: Hosts, *, at: Sequence[int], meanwhile: Callable[[], object] | None = None
) -> Streamed:
    """Reads a stream at the first of these hosts; calls `meanwhile` in its middle."""

    async def read() -> Streamed:
        listener = Listener("stream")
        transport = _InTurn([_url(hosts, host) for host in at])
        async with httpx.AsyncClient(
            base_url=_url(hosts, at[0]), transport=transport, timeout=120
        ) as client:
            reading = asyncio.ensure_future(stream(client, listener, _BODY, max_attempts=40))
            if meanwhile is not None:
                while len(listener.heard().tokens) < _EARLY and not reading.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(meanwhile)
            await reading
        return listener.heard()

    streamed = _run(read())
    assert streamed.is_complete, streamed.error
    return streamed


def _run(coroutine: Coroutine[Any, Any, Streamed]) -> Streamed:
    return asyncio.run(coroutine)


@pytest.fixture(scope="module")
def undisturbed(fronts: HostsService) -> Streamed:
    return _streamed(fronts.hosts, at=[1])


@pytest.mark.parametrize("host", _FRONTS)
def test_a_client_of_a_killed_proxy_goes_on_at_the_other_host(
    host: int, fronts: HostsService, undisturbed: Streamed
) -> None:
    (other,) = set(_FRONTS) - {host}
    proxy = _proxy_of(fronts.hosts, host)
    streamed = _streamed(fronts.hosts, at=[host, other], meanwhile=proxy.kill)
    assert streamed.tokens == undisturbed.tokens
    assert streamed.num_resumed == 1
    assert streamed.longest_pause_s < 2.0
    until(lambda: _is_front(fronts.hosts, host), timeout_s=60)


def test_streams_and_new_requests_do_without_the_head_until_it_is_back(
    fronts: HostsService, ray_hosts: RayHosts, undisturbed: Streamed
) -> None:
    hosts = fronts.hosts
    streamed = _streamed(hosts, at=[1], meanwhile=lambda: ray_hosts.stop(_HEAD))
    assert streamed.tokens == undisturbed.tokens
    assert streamed.num_resumed == 0
    for host in _FRONTS:
        assert _streamed(hosts, at=[host]).tokens == undisturbed.tokens
    ray_hosts.restart(_HEAD)
    began_s = time.monotonic()
    for host in (_HEAD, *_FRONTS):
        until(lambda host=host: _is_front(hosts, host), timeout_s=120)  # type: ignore[misc]
        assert _streamed(hosts, at=[host]).tokens == undisturbed.tokens
    assert time.monotonic() - began_s < 120
