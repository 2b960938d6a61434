"""A service under test: its address, and how to find and kill its processes."""

import asyncio
import os
import queue
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

from eesd_dist.errors import EesdError
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Emission, Request
from serve_app.config import ServiceConfig
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.pipeline_client import ServiceClient
from serve_app.pipeline.reports import PipelineState

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Running:
    """A running service."""

    url: str
    config: ServiceConfig
    pipelines: Any
    """A Serve handle."""

    def state(self) -> PipelineState:
        state: PipelineState = self.pipelines.state.remote().result(timeout_s=30)
        return state

    def num_running(self) -> int:
        """Returns the number of requests in the engine."""
        num_running: int = self.pipelines.stats.remote().result(timeout_s=30).num_running
        return num_running

    def ready_after(self, before: PipelineState) -> PipelineState:
        """Returns the state after the next epoch has started; a stream may continue before that."""

        def mended() -> PipelineState | None:
            state = self.state()
            return state if state.is_ready and state.epoch > before.epoch else None

        state = until(mended, timeout_s=120.0)
        assert state is not None
        return state

    def signal(self, worker: str, number: signal.Signals) -> None:
        """Sends a signal to the process of a worker, e.g. `verify rank 1`."""
        pids = {m.name: m.pid for m in self.state().workers}
        os.kill(pids[worker], number)

    def items(self, request: Request) -> "Items":
        """Sends the request as an ingress does; returns its emissions, and the error that ends it
        as the last item."""
        return Items(_client_of(self), request)

    def num_attempts(self) -> int:
        """Returns how often `items` has sent a request to a pipeline."""
        page = _client_of(self)._load_balancer.page()
        match = re.search(rb"^eesd_router_requests_total\S* (\S+)$", page, re.MULTILINE)
        return int(float(match[1])) if match else 0


class Items:
    """A stream that is read by a thread with an event loop, and here item by item."""

    def __init__(self, client: ServiceClient, request: Request) -> None:
        self._read: queue.SimpleQueue[tuple[Emission, ...] | EesdError | None] = queue.SimpleQueue()
        self._reading = asyncio.run_coroutine_threadsafe(self._run(client, request), _loop())

    def __iter__(self) -> "Items":
        return self

    def __next__(self) -> Any:
        item = self._read.get(timeout=200)
        if item is None:
            raise StopIteration
        return item

    async def _run(self, client: ServiceClient, request: Request) -> None:
        try:
            async for emissions in client.stream(request):
                self._read.put(emissions)
        except EesdError as error:
            self._read.put(error)
        finally:
            self._read.put(None)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="test clients", daemon=True).start()
    return loop


@cache
def _client_of(running: Running) -> ServiceClient:
    async def client() -> ServiceClient:
        load_balancer = LoadBalancer(running.config, pipelines=running.pipelines)
        return ServiceClient(
            running.pipelines,
            config=running.config,
            tracing=Tracing(),
            load_balancer=load_balancer,
        )

    return asyncio.run_coroutine_threadsafe(client(), _loop()).result()


def tokens_of(items: Any) -> list[int]:
    """Returns all tokens of a stream; raises the error that ended it."""
    tokens: list[int] = []
    for item in items:
        if isinstance(item, Exception):
            raise item
        tokens += [token for emission in item for token in emission.tokens]
    return tokens


def descendants(root: int | None = None) -> set[Process]:
    """Returns children, their children and so on, of this process or of `root`, that run."""
    try:
        return set(filter(_runs, Process(root).children(recursive=True)))
    except NoSuchProcess:
        return set()


def _runs(process: Process) -> bool:
    try:
        return process.status() != STATUS_ZOMBIE
    except NoSuchProcess:
        return False


def until(holds: Callable[[], T], *, timeout_s: float = 30.0) -> T:
    """Polls until the result is true; fails with the last result after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {answer!r}"
        time.sleep(0.1)
    return answer


def free_port() -> int:
    """Returns a port below the ephemeral range, since it is bound only later."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("100 ports are taken")
