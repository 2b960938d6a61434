"""Connections between the ranks of a group; both ends prove the secret of the epoch.

A rank connects to all lower ranks, at addresses from the rendezvous store, and accepts all higher
ones. Connections of others are refused and counted.
"""

import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from eesd_dist.transport.authentication.acceptor import Acceptor, SocketAddress, Unproven, listen
from eesd_dist.transport.authentication.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    new_nonce,
    proves,
)
from eesd_dist.transport.authentication.refused import RefusedConnections

_HELLO = struct.Struct(f"!I{NONCE_BYTES}s{PROOF_BYTES}s")  # rank, nonce, proof
_ATTEMPT_S = 2.0
_RETRY_S = 0.1
_POLL_S = 0.2


class Proof(Protocol):
    def __call__(self, prover: int, verifier: int, *, nonces: bytes) -> bytes:
        """Returns the proof of the secret; `nonces`: the verifier's, then the prover's."""
        ...


class Stranger(Exception):
    """The process at a rank's address does not know the secret of the epoch."""


class AcceptedRank(NamedTuple):
    rank: int
    connection: socket.socket


class PeerListener:
    """Accepts the higher ranks of a group in a thread of its own, until all of them have come or it
    is closed, which it must be."""

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        peers: Collection[int],
        proof: Proof,
        refusals: RefusedConnections,
    ) -> None:
        listener = listen(address)
        self.at: SocketAddress = listener.getsockname()[:2]
        self._rank = rank
        self._missing = set(peers)
        self._proof = proof
        self._accepted: queue.SimpleQueue[AcceptedRank] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._acceptor = Acceptor(
            listener, self._selector, hello_bytes=_HELLO.size, refusals=refusals
        )
        self._thread = threading.Thread(target=self._run, name="joining ranks", daemon=True)
        self._thread.start()

    def accept(self, *, timeout_s: float) -> AcceptedRank | None:
        """Returns the next rank, or None when none has come in time."""
        try:
            return self._accepted.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stops listening, and closes the connections that `accept` has not returned."""
        self._wake.close()
        self._thread.join()
        while (arrival := self.accept(timeout_s=0.0)) is not None:
            arrival.connection.close()

    def _run(self) -> None:
        try:
            while self._missing and self._serve():
                pass
        finally:
            self._acceptor.close()
            self._woken.close()
            self._selector.close()

    def _serve(self) -> bool:
        """Waits for the next events. Returns False when the listener is closed."""
        until_s = self._acceptor.until_s
        left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
        for key, _ in self._selector.select(left_s):
            if key.fileobj is self._woken:
                return False
            candidate = self._acceptor.serve(key.fileobj)
            if candidate is not None:
                self._judge(candidate)
        self._acceptor.expire()
        return True

    def _judge(self, candidate: Unproven) -> None:
        rank, nonce, proof = _HELLO.unpack(candidate.hello)
        expected = self._proof(rank, self._rank, nonces=candidate.nonce + nonce)
        if not proves(proof, expected):
            candidate.send(REFUSED)
            self._acceptor.refuse(candidate, "wrong secret")
        elif rank not in self._missing:
            self._acceptor.refuse(candidate, f"rank {rank} is not awaited")
        elif candidate.send(self._proof(self._rank, rank, nonces=nonce + candidate.nonce)):
            self._missing.discard(rank)
            self._accepted.put(AcceptedRank(rank, self._acceptor.take(candidate)))
        else:
            self._acceptor.refuse(candidate, f"rank {rank} left before it was answered")


def connect_to_peer(
    at: SocketAddress,
    *,
    rank: int,
    peer: int,
    proof: Proof,
    deadline: float,
    is_cancelled: Callable[[], bool],
) -> socket.socket:
    """Returns the connection of this rank to a lower one, after both have proved the secret. Tries
    as often as the peer is too busy, until the deadline, a monotonic time.

    Raises Stranger, TimeoutError, or ConnectionError if nothing listens there or it was cancelled.
    """

    def left_s() -> float:
        if is_cancelled():
            raise ConnectionError("joining was cancelled")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    while True:
        connection = _connected(at, left_s)
        try:
            peer_nonce, nonce = _receive(connection, NONCE_BYTES, left_s), new_nonce()
            own_proof = proof(rank, peer, nonces=peer_nonce + nonce)
            connection.sendall(_HELLO.pack(rank, nonce, own_proof))
            answer = _receive(connection, PROOF_BYTES, left_s)
            if not proves(answer, proof(peer, rank, nonces=nonce + peer_nonce)):
                raise Stranger
        except ConnectionError:
            connection.close()
            time.sleep(min(left_s(), _RETRY_S))
        except BaseException:
            connection.close()
            raise
        else:
            return connection


def _connected(at: SocketAddress, left_s: Callable[[], float]) -> socket.socket:
    family, *_, bound = socket.getaddrinfo(*at, type=socket.SOCK_STREAM)[0]
    while True:
        connection = socket.socket(family)
        try:
            connection.settimeout(min(left_s(), _ATTEMPT_S))
            connection.connect(bound)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            connection.close()
            if not isinstance(error, TimeoutError):
                raise ConnectionError(str(error)) from error
            left_s()
        else:
            return connection


def _receive(connection: socket.socket, size: int, left_s: Callable[[], float]) -> bytes:
    """Receives exactly `size` bytes. Raises what `left_s` raises, and ConnectionError."""
    received = b""
    while len(received) < size:
        connection.settimeout(min(left_s(), _POLL_S))
        try:
            chunk = connection.recv(size - len(received))
        except TimeoutError:
            continue
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not chunk:
            raise ConnectionError("the connection was closed by the peer")
        received += chunk
    return received
