"""One connection: order, inboxes, deadlines, and ends of every kind."""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.transport import link as link_module
from eesd_dist.transport.link import Link
from tests.support.running import until

LATE_S = 10.0
"""Allowed delay of the end of a wait on a busy machine."""
MIB = 1 << 20


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return left, listener.accept()[0]


def linked() -> tuple[Link, Link]:
    left, right = sockets()
    return Link(left), Link(right)


def send(link: Link, content: bytes, *, tag: int = 0) -> None:
    link.send([memoryview(content)], tag=tag).wait(timeout_s=LATE_S)


def received(link: Link, *, tag: int = 0, timeout_s: float | None = LATE_S) -> bytes:
    return bytes(link.receive(tag=tag, timeout_s=timeout_s))


class Running(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.outcome: Any = None
        self._act = act
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._act()
        except OSError as error:
            self.outcome = error

    def result(self) -> Any:
        self.join(LATE_S)
        assert not self.is_alive(), "it still waits"
        return self.outcome


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300_000)), max_size=20))
def test_messages_of_a_tag_arrive_in_order_and_complete(messages: list[tuple[int, int]]) -> None:
    left, right = linked()
    contents = [(tag, os.urandom(size)) for tag, size in messages]
    sending = [left.send([memoryview(content)], tag=tag) for tag, content in contents]
    for chosen in range(4):
        for tag, content in contents:
            if tag == chosen:
                assert received(right, tag=tag) == content
    for message in sending:
        message.wait(timeout_s=LATE_S)


def test_buffers_are_sent_as_one_message_and_read_into_memory_of_its_size() -> None:
    left, right = linked()
    left.send([memoryview(b"ab"), memoryview(b""), memoryview(b"cde")], tag=1)
    into = bytearray(5)
    right.receive(tag=1, timeout_s=LATE_S, into=memoryview(into))
    assert into == b"abcde"
    left.send([memoryview(b"12"), memoryview(b"345")], tag=1)
    send(left, b"later", tag=2)
    assert received(right, tag=2) == b"later"
    right.receive(tag=1, timeout_s=LATE_S, into=memoryview(into))
    assert into == b"12345", "also out of an inbox"


def test_each_of_many_threads_gets_its_messages() -> None:
    left, right = linked()

    def receive_all(tag: int) -> list[bytes]:
        return [received(right, tag=tag) for _ in range(50)]

    waiting = [Running(partial(receive_all, tag)) for tag in range(5)]
    for number in range(50):
        for tag in (3, 1, 4, 0, 2):
            send(left, bytes([tag, number]), tag=tag)
    for tag, thread in enumerate(waiting):
        assert thread.result() == [bytes([tag, number]) for number in range(50)]


def test_both_ends_may_send_more_than_a_connection_holds_before_they_receive() -> None:
    ends = linked()
    content = os.urandom(32 * MIB)

    def swap(link: Link) -> bytes:
        sending = link.send([memoryview(content)], tag=0)
        arrived = received(link)
        sending.wait(timeout_s=LATE_S)
        return arrived

    for thread in [Running(partial(swap, link)) for link in ends]:
        assert thread.result() == content


def test_a_confirmed_message_is_waited_for_until_it_is_taken() -> None:
    left, right = linked()
    sending = left.send([memoryview(b"last")], tag=0, confirmed=True)
    waiting = Running(lambda: sending.wait(timeout_s=LATE_S))
    send(left, b"other", tag=1)
    assert received(right, tag=1) == b"other"
    time.sleep(0.1)
    assert waiting.is_alive(), "it has arrived, and nothing has taken it"
    assert received(right) == b"last"
    assert waiting.result() is None


def test_what_was_sent_before_the_end_can_be_read_after_it() -> None:
    left, right = linked()
    send(left, b"last words")
    left.end()
    gone = threading.Event()
    right.call_when_gone(gone.set)
    assert gone.wait(LATE_S)
    with pytest.raises(ConnectionError):
        right.send([memoryview(b"answer")], tag=0)
    assert received(right) == b"last words"
    with pytest.raises(ConnectionError, match="closed by the peer"):
        received(right)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_an_end_wakes_every_wait(timeout_s: float | None) -> None:
    left, right = linked()
    large = memoryview(bytes(64 * MIB))
    waiting = [
        Running(lambda: received(left, tag=1, timeout_s=timeout_s)),
        Running(lambda: received(left, tag=2, timeout_s=timeout_s)),
        Running(lambda: left.send([large], tag=3).wait(timeout_s=timeout_s)),
    ]
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in waiting)
    left.end("it was given up")
    outcomes = [thread.result() for thread in waiting]
    assert all(isinstance(outcome, ConnectionError) for outcome in outcomes)
    assert [str(outcome) for outcome in outcomes] == ["it was given up"] * 3
    with pytest.raises(ConnectionError, match="closed by the peer"):
        received(right, tag=4)


def test_a_missed_deadline_ends_the_connection_for_both_ends() -> None:
    left, right = linked()
    waiting = Running(lambda: received(right, timeout_s=None))
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        received(left, timeout_s=0.3)
    assert 0.25 < time.monotonic() - started_s < LATE_S
    assert isinstance(waiting.result(), ConnectionError)
    with pytest.raises(ConnectionError, match="deadline"):
        received(left)


def test_a_wait_next_to_one_that_reads_has_its_own_deadline() -> None:
    left, _right = linked()
    reading = Running(lambda: received(left, tag=1, timeout_s=None))
    time.sleep(0.1)
    with pytest.raises(TimeoutError):
        received(left, tag=2, timeout_s=0.2)
    assert isinstance(reading.result(), ConnectionError)


def test_a_send_to_a_peer_that_does_not_read_misses_its_deadline() -> None:
    left, _right = linked()
    sending = left.send([memoryview(bytes(64 * MIB))], tag=0)
    with pytest.raises(TimeoutError):
        sending.wait(timeout_s=0.3)


@pytest.mark.parametrize("size", [7, 16 * MIB])
def test_a_message_that_has_begun_is_received_after_the_deadline_too(size: int) -> None:
    left, right = linked()
    content = os.urandom(size)
    left.send([memoryview(content)], tag=0)
    time.sleep(0.1)
    assert received(right, timeout_s=-1.0) == content


def test_an_interrupted_wait_ends_the_connection_and_wakes_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = linked()

    def interrupt(view: memoryview, deadline: float | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(left, "_fill", interrupt)
    send(right, b"content")
    with pytest.raises(KeyboardInterrupt):
        received(left)
    with pytest.raises(ConnectionError, match="interrupted"):
        received(left)
    with pytest.raises(ConnectionError):
        received(right)


@pytest.mark.parametrize("has_waited", [False, True])
def test_a_message_of_another_size_than_its_memory_ends_the_connection(*, has_waited: bool) -> None:
    left, right = linked()
    send(left, b"four", tag=1)
    send(left, b"later", tag=2)
    if has_waited:  # in an inbox
        assert received(right, tag=2) == b"later"
    with pytest.raises(ConnectionError, match="found a message of 4 bytes, expected 5"):
        right.receive(tag=1, timeout_s=LATE_S, into=memoryview(bytearray(5)))
    with pytest.raises(ConnectionError):
        received(left)


def test_an_announced_size_that_cannot_be_is_refused_before_memory_is_taken() -> None:
    raw, right = sockets()
    link = Link(right)
    with raw:
        raw.sendall(link_module._HEADER.pack(0, 0, 1, 1 << 62))
        with pytest.raises(ConnectionError, match="expected a size that fits"):
            received(link)


def test_callers_are_told_of_an_end_once_also_when_it_is_over() -> None:
    left, right = linked()
    calls: list[str] = []
    left.call_when_gone(lambda: calls.append("early"))
    assert not calls
    right.end()
    until(lambda: calls == ["early"])
    left.call_when_gone(lambda: calls.append("late"))
    left.end()
    time.sleep(0.2)
    assert calls == ["early", "late"]


def test_a_link_without_references_closes_its_connection() -> None:
    left, right = linked()
    del left
    gc.collect()
    with pytest.raises(ConnectionError, match="closed by the peer"):
        received(right)


def test_many_links_come_and_go_without_leaving_a_file_handle() -> None:
    linked()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        left, right = linked()
        left.send([memoryview(bytes(20 * MIB))], tag=0)  # waits for room
        right.end()
        del left, right
    gc.collect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_peer_that_acknowledges_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut cable itself is in tests/hosts."""
    left, right = linked()
    left.end_if_silent()
    send(left, b"still there")
    assert received(right) == b"still there"
    # Another field that is not zero stands for segments in transit.
    monkeypatch.setattr(link_module, "_IN_TRANSIT", 16)
    monkeypatch.setattr(link_module, "_SILENCE_MS", -1)
    left.end_if_silent()
    with pytest.raises(ConnectionError, match=r"acknowledged nothing for \d+\.\d s"):
        received(left)


def test_a_busy_peer_is_not_cut_and_gets_everything() -> None:
    left, right = linked()
    content = bytes(32 * MIB)
    sending = left.send([memoryview(content)], tag=0)
    time.sleep(6.0)  # longer than a silence that cuts
    assert received(right) == content
    sending.wait(timeout_s=LATE_S)
