"""The kernel keeps connections of other hosts out of a listening socket, and counts them."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from eesd_dist.errors import EngineError
from eesd_dist.transport.authentication import connection_filter
from eesd_dist.transport.authentication.connection_filter import (
    ConnectionFilter,
    Listeners,
    filter_denial,
)

pytestmark = pytest.mark.skipif(
    filter_denial() is not None, reason="the kernel denies packet filters to this user"
)


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with suppress(OSError), socket.create_server((request.param, 0), family=family) as opened:
        yield opened
        return
    pytest.skip("this machine has no IPv6")


def _connect(listener: socket.socket, *, source: str) -> socket.socket:
    """Connects, or raises TimeoutError before the kernel repeats the attempt."""
    client = socket.socket(listener.family)
    client.settimeout(0.3)
    try:
        client.bind((source, 0))
        client.connect(listener.getsockname())
    except OSError:
        client.close()
        raise
    return client


def test_a_new_filter_admits_nothing(listener: socket.socket) -> None:
    filter_ = ConnectionFilter(listener.fileno())
    for number in (1, 2):
        with pytest.raises(TimeoutError):
            _connect(listener, source=listener.getsockname()[0])
        assert filter_.num_dropped == number
    filter_.release()


def test_a_filter_admits_the_named_hosts_and_no_other(listener: socket.socket) -> None:
    filter_ = ConnectionFilter(listener.fileno())
    host = listener.getsockname()[0]
    filter_.admit(["10.1.2.3", "fd00::2:0:0:1", host])
    with _connect(listener, source=host) as client, listener.accept()[0] as accepted:
        client.sendall(b"hello")
        assert accepted.recv(5) == b"hello"
    assert filter_.num_dropped == 0
    filter_.admit(["127.0.0.9", "::2"])
    with pytest.raises(TimeoutError):
        _connect(listener, source=host)
    assert filter_.num_dropped == 1
    filter_.release()


def test_another_address_of_the_same_network_is_another_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        filter_ = ConnectionFilter(listener.fileno())
        filter_.admit(["127.0.0.1"])
        with pytest.raises(TimeoutError):
            _connect(listener, source="127.0.0.2")
        assert filter_.num_dropped == 1
        filter_.release()


def test_accepted_connections_go_on_when_the_filter_blocks(listener: socket.socket) -> None:
    filter_ = ConnectionFilter(listener.fileno())
    host = listener.getsockname()[0]
    filter_.admit([host])
    with _connect(listener, source=host) as client, listener.accept()[0] as accepted:
        filter_.block()
        content = bytes(range(256)) * 1000
        client.sendall(content[:40_000])
        assert accepted.recv(40_000, socket.MSG_WAITALL) == content[:40_000]
        accepted.sendall(b"and back")
        assert client.recv(8) == b"and back"
        with pytest.raises(TimeoutError):
            _connect(listener, source=host)
    assert filter_.num_dropped == 1
    filter_.release()


def test_a_socket_that_takes_no_filter_is_an_error_that_names_the_option() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    with pytest.raises(EngineError, match=r"SO_ATTACH_FILTER\): Bad file descriptor"):
        ConnectionFilter(listener.fileno())


def test_the_socket_opened_since_is_found_and_no_other(listener: socket.socket) -> None:
    listeners = Listeners()
    with pytest.raises(OSError, match="no new listening socket"):
        listeners.new()
    bound = socket.socket(listener.family)
    bound.bind((listener.getsockname()[0], 0))
    with bound, listener.dup():
        with pytest.raises(OSError, match="no new listening socket"):
            listeners.new()
        bound.listen()
        assert listeners.new() == bound.fileno()
        filter_ = ConnectionFilter(bound.fileno())
        assert filter_.address == bound.getsockname()[:2]
        filter_.release()


def test_no_other_thread_runs_between_finding_a_socket_and_its_filter() -> None:
    turns, is_over = 0, False

    def take_turns() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            time.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as first:
        listeners = Listeners()
        other = threading.Thread(target=take_turns)
        other.start()
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(10.0)
        try:
            with socket.create_server(("127.0.0.1", 0)) as second:
                before = turns
                handle = listeners.new()
                connection_filter._attach(handle, [connection_filter._DROP])
                assert turns == before
                assert handle == second.fileno() != first.fileno()
                time.sleep(0.01)
                assert turns > before
        finally:
            is_over = True
            sys.setswitchinterval(interval_s)
            other.join()
