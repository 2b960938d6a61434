"""A head that no longer listens is noticed, waited for and given up."""

import socket
from collections.abc import Iterator

import pytest

from eesd_dist.errors import EngineError
from serve_app.service.ray_failures import RayWatch
from tests.support.running import free_port


class _Head:
    """A port that listens at times, and the lines and the time of a watch on it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.now_s = 0.0
        self.lines: list[str] = []
        self._server: socket.socket | None = None

    def watch(self, *, patience_s: float) -> RayWatch:
        return RayWatch(
            f"127.0.0.1:{self.port}",
            say=self.lines.append,
            patience_s=patience_s,
            clock=lambda: self.now_s,
        )

    def start(self) -> None:
        self._server = socket.create_server(("127.0.0.1", self.port))

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()


@pytest.fixture
def head() -> Iterator[_Head]:
    head = _Head()
    head.start()
    yield head
    head.stop()


def test_a_head_that_returns_in_time_is_said_to_be_gone_once_and_back_once(head: _Head) -> None:
    watch = head.watch(patience_s=20.0)
    assert watch.look()
    head.stop()
    for _ in range(3):
        head.now_s += 5.0
        assert not watch.look()
        assert not watch.answers
    assert "does not return within 20 s" in head.lines[0]
    head.start()
    assert watch.look()
    assert watch.answers
    assert head.lines[1:] == [f"Ray's head at 127.0.0.1:{head.port} answers again"]


def test_a_head_that_stays_away_ends_the_service_with_one_error(head: _Head) -> None:
    watch = head.watch(patience_s=20.0)
    head.stop()
    watch.look()
    head.now_s += 20.5
    with pytest.raises(EngineError, match=r"not answered for 20 s: without GCS fault tolerance"):
        watch.look()
    assert not watch.answers


def test_no_patience_is_longer_than_rays_own(head: _Head) -> None:
    watch = head.watch(patience_s=600.0)
    head.stop()
    watch.look()
    head.now_s += 46.0
    with pytest.raises(EngineError, match="for 45 s"):
        watch.look()
