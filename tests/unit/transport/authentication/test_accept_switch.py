"""A library accepts at its listening socket only while the switch lets it, and at the end the
socket no longer listens, without any privilege."""

import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from eesd_dist.errors import EngineError
from eesd_dist.transport.authentication.accept_switch import AcceptSwitch


class Library:
    """Accepts what its epoll set reports, like Gloo."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family)
        self.listener.setblocking(False)
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)

    def accepted(self) -> list[socket.socket]:
        """Returns the connections of one turn of its loop."""
        accepted: list[socket.socket] = []
        for handle, events in self.epoll.poll(0.05):
            assert (handle, events) == (self.listener.fileno(), select.EPOLLIN)
            with suppress(BlockingIOError):
                while True:
                    accepted.append(self.listener.accept()[0])
        return accepted


@pytest.fixture(params=["127.0.0.1", "::1"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    try:
        library = Library(request.param)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with closing(library.epoll), closing(library.listener):
        yield library


def test_connections_before_the_peers_are_known_are_not_accepted_but_cut_and_counted(
    library: Library,
) -> None:
    switch = AcceptSwitch(library.listener.fileno())
    with socket.create_connection(switch.address) as early:
        early.sendall(bytes(8))
        assert library.accepted() == []
        switch.admit([])
        assert switch.num_dropped == 1
        with suppress(ConnectionResetError):
            assert early.recv(1) == b""
        assert library.accepted() == []
    switch.release()


def test_a_connection_that_came_before_the_switch_is_cut_or_was_accepted(library: Library) -> None:
    with socket.create_connection(library.listener.getsockname()[:2]):
        switch = AcceptSwitch(library.listener.fileno())
        assert switch.cut_waiting()
        assert not switch.cut_waiting()
        assert switch.num_dropped == 1
    switch.release()


def test_accepted_connections_go_on_when_the_socket_no_longer_listens(library: Library) -> None:
    switch = AcceptSwitch(library.listener.fileno())
    switch.admit([])
    with socket.create_connection(switch.address) as peer:
        (accepted,) = library.accepted()
        switch.block()
        peer.sendall(b"hello")
        assert accepted.recv(5) == b"hello"
        accepted.sendall(b"and back")
        assert peer.recv(8) == b"and back"
        accepted.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(switch.address)
    switch.release()


def test_a_library_that_was_about_to_accept_finds_nothing_and_takes_its_handle_back(
    library: Library,
) -> None:
    """Gloo ends the process on any error of these calls but EAGAIN."""
    switch = AcceptSwitch(library.listener.fileno())
    switch.admit([])
    with socket.create_connection(switch.address):
        assert library.epoll.poll(0.5)
        switch.block()
        with pytest.raises(BlockingIOError):
            library.listener.accept()
    assert library.epoll.poll(0.05) == []
    library.epoll.unregister(library.listener.fileno())
    switch.release()


def test_a_handle_that_a_forked_child_holds_does_not_keep_the_socket_listening(
    library: Library,
) -> None:
    with socket.socket(fileno=os.dup(library.listener.fileno())):
        switch = AcceptSwitch(library.listener.fileno())
        switch.admit([])
        switch.block()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(switch.address)
        assert library.epoll.poll(0.05) == []
    switch.release()


def test_the_port_is_kept_until_the_release() -> None:
    """A socket that got it would be taken for this one's."""
    library = Library("127.0.0.1")
    switch = AcceptSwitch(library.listener.fileno())
    switch.admit([])
    switch.block()
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(switch.address)
    switch.release()
    with socket.socket() as other:
        other.bind(switch.address)
    library.epoll.close()
    library.listener.close()


def test_a_socket_that_no_epoll_set_watches_is_an_error_that_says_what_to_do() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(EngineError, match=r"no epoll set watches .*SO_ATTACH_FILTER"),
    ):
        AcceptSwitch(listener.fileno())
