"""A service under test: where it answers, and how its processes are found and killed."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from eesd_dist.types import Request
from serve_app.config import ServiceConfig
from serve_app.pipeline.deployment import PipelineState

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A service that answers."""

    url: str
    config: ServiceConfig
    pipelines: Any
    """A Serve handle."""

    def state(self) -> PipelineState:
        state: PipelineState = self.pipelines.state.remote().result(timeout_s=30)
        return state

    def num_running(self) -> int:
        """Requests inside the engine."""
        num_running: int = self.pipelines.stats.remote().result(timeout_s=30).num_running
        return num_running

    def ready_after(self, before: PipelineState) -> PipelineState:
        """Its state once it was formed again, which a stream need not have waited for."""

        def mended() -> PipelineState | None:
            state = self.state()
            return state if state.is_ready and state.epoch > before.epoch else None

        state = until(mended, timeout_s=120.0)
        assert state is not None
        return state

    def signal(self, worker: str, number: signal.Signals) -> None:
        """To the process behind a worker, e.g. `verify rank 1`."""
        pids = {m.name: m.pid for m in self.state().workers}
        os.kill(pids[worker], number)

    def items(self, request: Request) -> Any:
        """The pipeline's stream of the request, its first word taken off."""
        stream = iter(self.pipelines.options(stream=True).stream.remote(request))
        next(stream)
        return stream


def tokens_of(items: Any) -> list[int]:
    """All tokens of a stream; raises the error that ended it."""
    tokens: list[int] = []
    for item in items:
        if isinstance(item, Exception):
            raise item
        tokens += [token for emission in item for token in emission.tokens]
    return tokens


def until(holds: Callable[[], T], *, timeout_s: float = 30.0) -> T:
    """Asks again and again; fails with the last answer when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {answer!r}"
        time.sleep(0.1)
    return answer


def free_port() -> int:
    """Below those that the system gives to whoever asks for any, since it is bound only later."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("100 ports are taken")
