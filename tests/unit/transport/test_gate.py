"""The kernel keeps connections of other hosts out of a listening socket, and counts them."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from eesd_dist.transport.gate import Gate


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


def test_nothing_passes_a_gate_that_was_never_opened(listener: socket.socket) -> None:
    gate = Gate(listener.dup())
    for number in (1, 2):
        with pytest.raises(TimeoutError):
            _connect(listener, source=listener.getsockname()[0])
        assert gate.num_dropped == number
    gate.release()


def test_an_open_gate_lets_its_hosts_in_and_no_other(listener: socket.socket) -> None:
    gate = Gate(listener.dup())
    host = listener.getsockname()[0]
    gate.open_to(["10.1.2.3", "fd00::2:0:0:1", host])
    with _connect(listener, source=host) as client, listener.accept()[0] as accepted:
        client.sendall(b"hello")
        assert accepted.recv(5) == b"hello"
    assert gate.num_dropped == 0
    gate.open_to(["127.0.0.9", "::2"])
    with pytest.raises(TimeoutError):
        _connect(listener, source=host)
    assert gate.num_dropped == 1
    gate.release()


def test_another_address_of_the_same_network_is_another_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gate = Gate(listener.dup())
        gate.open_to(["127.0.0.1"])
        with pytest.raises(TimeoutError):
            _connect(listener, source="127.0.0.2")
        assert gate.num_dropped == 1
        gate.release()


def test_accepted_connections_go_on_when_the_gate_closes(listener: socket.socket) -> None:
    gate = Gate(listener.dup())
    host = listener.getsockname()[0]
    gate.open_to([host])
    with _connect(listener, source=host) as client, listener.accept()[0] as accepted:
        gate.close()
        sent = bytes(range(256)) * 1000
        client.sendall(sent[:40_000])
        assert accepted.recv(40_000, socket.MSG_WAITALL) == sent[:40_000]
        accepted.sendall(b"and back")
        assert client.recv(8) == b"and back"
        with pytest.raises(TimeoutError):
            _connect(listener, source=host)
    assert gate.num_dropped == 1
    gate.release()
