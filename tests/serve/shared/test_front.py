"""What Serve runs around the application dies, and clients lose at most their connection."""

import time

from psutil import NoSuchProcess, Process

from tests.support.http_streams import streamed
from tests.support.running import Running, descendants, until


def _processes(name: str) -> list[Process]:
    return [p for p in descendants() if _title(p).startswith(f"ray::{name}")]


def _title(process: Process) -> str:
    try:
        return " ".join(process.cmdline())
    except NoSuchProcess:
        return ""


def test_streams_and_requests_do_without_serves_controller(service: Running) -> None:
    undisturbed = streamed(service.url)
    (before,) = _processes("ServeController")
    disturbed = streamed(service.url, meanwhile=before.kill)
    assert (disturbed.tokens, disturbed.num_resumed) == (undisturbed.tokens, 0)
    assert streamed(service.url).tokens == undisturbed.tokens
    # Ray starts another process some time after it has noticed that this one is gone.
    (after,) = until(lambda: _processes("ServeController"), timeout_s=60)
    assert after.pid != before.pid
    until(lambda: service.state().is_ready, timeout_s=60)


def test_a_killed_proxy_is_replaced_and_its_stream_continues(service: Running) -> None:
    undisturbed = streamed(service.url)
    before = service.state()
    began_s = time.monotonic()
    (proxy,) = _processes("ProxyActor")
    disturbed = streamed(service.url, meanwhile=proxy.kill)
    assert disturbed.tokens == undisturbed.tokens
    assert disturbed.num_resumed == 1
    assert service.state().epoch == before.epoch
    assert time.monotonic() - began_s < 60
    print(f"longest pause {disturbed.longest_pause_s:.1f} s")  # noqa: T201
