"""Ranks connect once both ends have proved the secret; strangers are refused, named and counted."""

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from eesd_dist.transport.authentication import acceptor, peers
from eesd_dist.transport.authentication.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    new_nonce,
    peer_proof,
)
from eesd_dist.transport.authentication.peers import (
    PeerListener,
    Proof,
    Stranger,
    connect_to_peer,
)
from eesd_dist.transport.authentication.refused import RefusedConnections
from tests.support.running import until

SOON_S = 10.0


def proof_of(secret: str, *, group: str = "epoch 1/verify") -> Proof:
    def proof(prover: int, verifier: int, *, nonces: bytes) -> bytes:
        return peer_proof(secret, group=group, prover=prover, verifier=verifier, nonces=nonces)

    return proof


OURS = proof_of("the secret")


@pytest.fixture
def refusals() -> RefusedConnections:
    return RefusedConnections()


@contextmanager
def listening(refusals: RefusedConnections, *ranks: int) -> Iterator[PeerListener]:
    listener = PeerListener("127.0.0.1", rank=0, peers=ranks, proof=OURS, refusals=refusals)
    try:
        yield listener
    finally:
        listener.close()


def connect(
    at: tuple[str, int], *, rank: int = 1, proof: Proof = OURS, timeout_s: float = SOON_S
) -> socket.socket:
    return connect_to_peer(
        at,
        rank=rank,
        peer=0,
        proof=proof,
        deadline=time.monotonic() + timeout_s,
        is_cancelled=lambda: False,
    )


def refuses_connections(at: tuple[str, int]) -> bool:
    try:
        socket.create_connection(at, timeout=SOON_S).close()
    except ConnectionRefusedError:
        return True
    return False


def test_every_rank_is_accepted_once_and_then_nothing_listens(
    refusals: RefusedConnections,
) -> None:
    with listening(refusals, 1, 2, 3) as listener, ThreadPoolExecutor(3) as threads:
        links = list(threads.map(lambda rank: connect(listener.at, rank=rank), (2, 3, 1)))
        accepted = [listener.accept(timeout_s=SOON_S) for _ in links]
        by_rank = {arrival.rank: arrival.connection for arrival in accepted if arrival}
        assert sorted(by_rank) == [1, 2, 3]
        for rank, link in zip((2, 3, 1), links, strict=True):
            with link, by_rank[rank] as connection:
                link.sendall(bytes([rank]))
                connection.settimeout(SOON_S)
                assert connection.recv(9) == bytes([rank]), "nothing of the handshake is left"
        until(lambda: refuses_connections(listener.at))
    assert refusals.num_refused == 0


@pytest.mark.parametrize(
    "proof", [proof_of("a guess"), proof_of("the secret", group="epoch 2/verify")]
)
def test_a_wrong_proof_is_refused_and_the_rank_still_gets_in(
    refusals: RefusedConnections, proof: Proof
) -> None:
    with listening(refusals, 1) as listener:
        with pytest.raises(Stranger):
            connect(listener.at, proof=proof)
        until(lambda: refusals.num_refused == 1)
        with connect(listener.at):
            arrival = listener.accept(timeout_s=SOON_S)
            assert arrival is not None
            arrival.connection.close()


def test_a_rank_that_is_not_awaited_is_refused(refusals: RefusedConnections) -> None:
    with listening(refusals, 1, 2) as listener, connect(listener.at, rank=1):
        for rank in (0, 1, 7):
            with pytest.raises((ConnectionError, TimeoutError)):
                connect(listener.at, rank=rank, timeout_s=0.5)
    assert refusals.num_refused >= 3


def test_silent_connections_are_cut_and_delay_no_rank(
    refusals: RefusedConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_PROOF_WITHIN_S", 0.3)
    with listening(refusals, 1, 2) as listener:
        silent = [socket.create_connection(listener.at, timeout=SOON_S) for _ in range(100)]
        started_s = time.monotonic()
        connect(listener.at).close()
        assert time.monotonic() - started_s < 5.0
        until(lambda: refusals.num_refused == 100)
        for link in silent:
            link.close()


def test_a_closed_listener_cuts_what_it_has_accepted(refusals: RefusedConnections) -> None:
    with listening(refusals, 1) as listener:
        link = socket.create_connection(listener.at, timeout=SOON_S)
        assert len(link.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
    with link:
        assert link.recv(1) == b""
    until(lambda: refuses_connections(listener.at))


@contextmanager
def stranger(*answers: bytes) -> Iterator[socket.socket]:
    """Listens in the place of a rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:

        def serve() -> None:
            connection, _ = listener.accept()
            with closing(connection):
                for answer in answers:
                    connection.sendall(answer)
                connection.settimeout(SOON_S)
                while connection.recv(4096):
                    pass

        serving = thread.submit(serve)
        yield listener
        serving.result(SOON_S)


@pytest.mark.parametrize("answer", [REFUSED, bytes(range(PROOF_BYTES))])
def test_a_stranger_in_the_place_of_a_rank_is_known_by_its_proof(answer: bytes) -> None:
    with stranger(new_nonce(), answer) as listener, pytest.raises(Stranger):
        connect(listener.getsockname())


def test_a_stranger_that_reflects_our_proof_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:

        def serve() -> None:
            connection, _ = listener.accept()
            with closing(connection):
                connection.sendall(new_nonce())
                hello = connection.recv(4 + NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
                connection.sendall(hello[-PROOF_BYTES:])

        serving = thread.submit(serve)
        with pytest.raises(Stranger):
            connect(listener.getsockname())
        serving.result(SOON_S)


def test_a_silent_stranger_costs_the_time_to_join_and_a_closed_port_none() -> None:
    with stranger() as listener:
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            connect(listener.getsockname(), timeout_s=0.5)
        assert 0.4 < time.monotonic() - started_s < SOON_S
    with pytest.raises(ConnectionError, match="refused"):
        connect(_closed_port())


def _closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at: tuple[str, int] = listener.getsockname()
    return at


def test_a_busy_peer_that_cuts_the_connection_is_tried_again(
    refusals: RefusedConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_RETRY_S", 0.01)
    monkeypatch.setattr(acceptor, "_PROOF_WITHIN_S", -1.0)  # cuts everything at once
    with listening(refusals, 1) as listener, ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(connect, listener.at)
        until(lambda: refusals.num_refused >= 3)
        assert not connecting.done()
        monkeypatch.setattr(acceptor, "_PROOF_WITHIN_S", SOON_S)
        connecting.result(SOON_S).close()


def test_joining_ends_when_it_is_cancelled() -> None:
    with stranger() as listener:
        started_s = time.monotonic()
        with pytest.raises(ConnectionError, match="cancelled"):
            connect_to_peer(
                listener.getsockname(),
                rank=1,
                peer=0,
                proof=OURS,
                deadline=started_s + 60.0,
                is_cancelled=lambda: time.monotonic() > started_s + 0.3,
            )
        assert time.monotonic() - started_s < SOON_S


def test_a_hello_of_garbage_is_refused(refusals: RefusedConnections) -> None:
    with listening(refusals, 1) as listener:
        with socket.create_connection(listener.at, timeout=SOON_S) as link:
            link.recv(NONCE_BYTES, socket.MSG_WAITALL)
            link.sendall(struct.pack("!I", 1 << 31) + b"\xff" * (NONCE_BYTES + PROOF_BYTES))
            assert link.recv(PROOF_BYTES, socket.MSG_WAITALL) == REFUSED
            assert link.recv(1) == b""
        assert refusals.num_refused == 1
