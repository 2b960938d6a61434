"""The store answers the ranks of its epoch; every other connection is cut and counted."""

import gc
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from eesd_dist.errors import PeerLost
from eesd_dist.transport.authentication import acceptor
from eesd_dist.transport.authentication.handshake import NONCE_BYTES, PROOF_BYTES, REFUSED, Address
from eesd_dist.transport.authentication.key_store import KeysMissing, StoreClient, StoreHost

SOON_S = 5.0
"""Allowed delay on a busy machine."""


@pytest.fixture
def host() -> Iterator[StoreHost]:
    host = StoreHost()
    yield host
    del host


def _join(at: Address) -> StoreClient:
    client = StoreClient(at)
    client.connect(timeout_s=10.0)
    return client


class Unproven:
    """Connections without the secret, as far as the host's nonce."""

    def __init__(self) -> None:
        self._links: list[socket.socket] = []

    def dial(self, at: Address) -> socket.socket:
        link = socket.create_connection((at.host, at.port), timeout=10.0)
        self._links.append(link)
        assert len(link.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        return link

    def leave(self) -> None:
        for link in self._links:
            link.close()


@pytest.fixture
def unproven() -> Iterator[Unproven]:
    unproven = Unproven()
    yield unproven
    unproven.leave()


def _is_cut(link: socket.socket) -> bool:
    """Waits for the end of the connection."""
    try:
        while link.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _works(host: StoreHost) -> bool:
    """Whether two ranks meet at once."""
    began_s = time.monotonic()
    first, second = _join(host.at), _join(host.at)
    second.put("met", b"yes")
    assert first.get("met", timeout_s=SOON_S) == (b"yes",)
    return time.monotonic() - began_s < 1.0


def test_a_rank_waits_for_what_another_one_sets(host: StoreHost) -> None:
    first, second = _join(host.at), _join(host.at)
    first.put("mine", b"1")
    setting = threading.Timer(0.1, second.put, args=("theirs", b"2" * 100_000))
    setting.start()
    assert first.get("mine", "theirs", timeout_s=SOON_S) == (b"1", b"2" * 100_000)
    assert second.get("mine", timeout_s=SOON_S) == (b"1",)
    setting.join()
    assert host.refusals.num_refused == 0


def test_the_first_key_that_is_not_set_in_time_is_named_and_the_connection_goes_on(
    host: StoreHost,
) -> None:
    client = _join(host.at)
    client.put("there", b"")
    with pytest.raises(KeysMissing, match=r"not set in time: a, b") as caught:
        client.get("there", "a", "b", timeout_s=0.05)
    assert caught.value.keys == ("a", "b")
    assert client.get("there", timeout_s=SOON_S) == (b"",)


def test_a_secret_is_not_shown_and_travels_between_processes() -> None:
    at = Address(host="10.0.0.1", port=1, secret="s3cret")
    assert "s3cret" not in repr(at)
    assert "s3cret" not in str([at])
    assert pickle.loads(pickle.dumps(at)).secret == "s3cret"


def test_every_store_has_a_secret_of_its_own(host: StoreHost) -> None:
    other = StoreHost()
    assert len({host.at.secret, other.at.secret}) == 2
    assert len(bytes.fromhex(host.at.secret)) == 32


@pytest.mark.parametrize("secret", ["", "00" * 32])
def test_a_wrong_secret_is_refused_at_once_and_counted(host: StoreHost, secret: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="refused the secret, which is that of another epoch"):
        _join(replace(host.at, secret=secret))
    assert time.monotonic() - began_s < SOON_S
    _wait_until(lambda: host.refusals.num_refused == 1)
    assert _works(host)


def test_a_connection_that_stays_silent_delays_nothing_and_is_cut(
    host: StoreHost, unproven: Unproven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_PROOF_WITHIN_S", 0.4)
    silent = [unproven.dial(host.at) for _ in range(3)]
    silent[1].sendall(bytes(NONCE_BYTES))  # half of a proof
    assert _works(host)
    assert all(_is_cut(link) for link in silent)
    _wait_until(lambda: host.refusals.num_refused == 3)


def test_more_silent_connections_than_are_kept_do_not_keep_a_rank_out(
    host: StoreHost, unproven: Unproven
) -> None:
    silent = [unproven.dial(host.at) for _ in range(100)]
    assert _works(host)
    _wait_until(lambda: host.refusals.num_refused >= 36)
    assert _is_cut(silent[0])
    assert host.refusals.num_refused < 100, "only as many as were too many"


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, bytes(NONCE_BYTES + PROOF_BYTES), b"\xff" * 100_000],
)
def test_garbage_is_cut_and_counted(host: StoreHost, unproven: Unproven, words: bytes) -> None:
    link = unproven.dial(host.at)
    with suppress(ConnectionError):
        link.sendall(words)
    assert _is_cut(link)
    _wait_until(lambda: host.refusals.num_refused == 1)
    assert _works(host)


def test_connections_that_leave_in_the_middle_are_counted(
    host: StoreHost, unproven: Unproven
) -> None:
    polite = unproven.dial(host.at)
    polite.close()
    rude = unproven.dial(host.at)
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rude.close()  # resets
    _wait_until(lambda: host.refusals.num_refused == 2)
    assert _works(host)


class Relay:
    """Stands between a rank and a store, and records what passes."""

    def __init__(self, to: Address) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.at = replace(to, port=self._listener.getsockname()[1])
        self.from_rank = b""
        self.from_host = b""
        self._to = to
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        rank, _ = self._listener.accept()
        self._listener.close()
        with rank, socket.create_connection((self._to.host, self._to.port)) as host:
            self.from_host = host.recv(NONCE_BYTES, socket.MSG_WAITALL)
            rank.sendall(self.from_host)
            self.from_rank = rank.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            host.sendall(self.from_rank)
            proof = host.recv(PROOF_BYTES, socket.MSG_WAITALL)
            rank.sendall(proof)
            self.from_host += proof

    def join(self) -> None:
        self._thread.join(10.0)


def test_a_recorded_handshake_is_refused_in_its_own_epoch_and_in_the_next(
    host: StoreHost, unproven: Unproven
) -> None:
    relay = Relay(host.at)
    _join(relay.at)
    relay.join()
    assert len(relay.from_rank) == NONCE_BYTES + PROOF_BYTES
    assert bytes.fromhex(host.at.secret) not in relay.from_rank + relay.from_host
    assert host.at.secret.encode() not in relay.from_rank + relay.from_host
    next_epoch = StoreHost()
    for store in (host, next_epoch):
        link = unproven.dial(store.at)
        link.sendall(relay.from_rank)
        assert link.recv(PROOF_BYTES, socket.MSG_WAITALL) == REFUSED
        assert _is_cut(link)
        _wait_until(lambda store=store: store.refusals.num_refused == 1)  # type: ignore[misc]


def test_a_host_that_only_repeats_what_it_gets_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = Address(host="127.0.0.1", port=listener.getsockname()[1], secret="ab" * 32)

        def pretend() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(bytes(NONCE_BYTES))
                message = link.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
                link.sendall(message[NONCE_BYTES:])

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PeerLost, match="does not know the secret of the epoch"):
            _join(at)
        thread.join(10.0)


@pytest.mark.parametrize(
    "words", [struct.pack("!I", 1 << 30), struct.pack("!I", 3) + b"\xc1\xc1\xc1"]
)
def test_a_rank_that_breaks_the_protocol_is_cut_alone(host: StoreHost, words: bytes) -> None:
    broken, other = _join(host.at), _join(host.at)
    broken._socket.sendall(words)
    with pytest.raises(OSError, match=r"closed|reset"):
        broken.get("anything", timeout_s=SOON_S)
    other.put("still", b"here")
    assert other.get("still", timeout_s=SOON_S) == (b"here",)


def test_requests_end_when_the_connection_is_closed_or_the_store_ends() -> None:
    host = StoreHost()
    first, second = _join(host.at), _join(host.at)
    ended: list[str] = []

    def wait(client: StoreClient) -> None:
        try:
            client.get("never", timeout_s=60.0)
        except OSError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=wait, args=(client,)) for client in (first, second)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    first.close()
    threads[0].join(SOON_S)
    assert len(ended) == 1
    at = host.at
    del host
    gc.collect()
    threads[1].join(SOON_S)
    assert len(ended) == 2
    with pytest.raises(PeerLost, match=r"not reachable within 0\.2 s"):
        StoreClient(at).connect(timeout_s=0.2)


def test_a_connection_that_was_closed_stops_trying_to_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = StoreClient(Address(host="127.0.0.1", port=silent.getsockname()[1], secret="s"))
        closing = threading.Timer(0.2, client.close)
        closing.start()
        began_s = time.monotonic()
        with pytest.raises(PeerLost, match="closed here"):
            client.connect(timeout_s=60.0)
        assert time.monotonic() - began_s < SOON_S
