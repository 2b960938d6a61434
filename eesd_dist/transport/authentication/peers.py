"""Connections between the ranks of a group; both ends prove the secret of the epoch.

A rank connects to all lower ranks, at addresses from the rendezvous store, and accepts all higher
ones. Connections of others are refused and counted; they do not delay the ranks.
"""

import queue
import select
import selectors
import socket
import struct
import threading
import time
import weakref
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

_RANK = struct.Struct("!I")
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
    is closed."""

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
        self._accepted: queue.SimpleQueue[AcceptedRank] = queue.SimpleQueue()
        self._wake, woken = socket.socketpair()
        accepting = _Accepting(
            listener,
            woken,
            rank=rank,
            missing=set(peers),
            proof=proof,
            refusals=refusals,
            accepted=self._accepted,
        )
        self._thread = threading.Thread(target=accepting.run, name="joining ranks", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._wake.close)

    def accept(self, *, timeout_s: float) -> AcceptedRank | None:
        """Returns the next rank, or None when none has come in time."""
        try:
            return self._accepted.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stops listening, and closes the connections that were not asked for."""
        self._end()
        self._thread.join()
        while (arrival := self.accept(timeout_s=0.0)) is not None:
            arrival.connection.close()


class _Accepting:
    """Serves the listener in one thread, until the other end of `woken` is closed."""

    def __init__(
        self,
        listener: socket.socket,
        woken: socket.socket,
        *,
        rank: int,
        missing: set[int],
        proof: Proof,
        refusals: RefusedConnections,
        accepted: "queue.SimpleQueue[AcceptedRank]",
    ) -> None:
        self._woken = woken
        self._rank = rank
        self._missing = missing
        self._proof = proof
        self._accepted = accepted
        self._selector = selectors.DefaultSelector()
        self._selector.register(woken, selectors.EVENT_READ)
        self._acceptor = Acceptor(
            listener,
            self._selector,
            hello_bytes=_RANK.size + NONCE_BYTES + PROOF_BYTES,
            refusals=refusals,
        )

    def run(self) -> None:
        try:
            while self._missing and self._serve():
                pass
        finally:
            self._acceptor.close()
            self._woken.close()
            self._selector.close()

    def _serve(self) -> bool:
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
        (rank,) = _RANK.unpack_from(candidate.hello)
        nonce, proof = _split(candidate.hello[_RANK.size :])
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
    while True:
        connection = _connected(at, deadline, is_cancelled)
        try:
            return _proven(
                connection,
                rank=rank,
                peer=peer,
                proof=proof,
                receive=_Receive(connection, deadline, is_cancelled),
            )
        except (ConnectionError, TimeoutError) as error:
            connection.close()
            if isinstance(error, TimeoutError) or is_cancelled():
                raise
            time.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise


def _connected(
    at: SocketAddress, deadline: float, is_cancelled: Callable[[], bool]
) -> socket.socket:
    family, *_, bound = socket.getaddrinfo(*at, type=socket.SOCK_STREAM)[0]
    while True:
        left_s = _left_s(deadline, is_cancelled)
        connection = socket.socket(family)
        connection.settimeout(min(left_s, _ATTEMPT_S))
        try:
            connection.connect(bound)
        except TimeoutError:
            connection.close()
            continue
        except OSError as error:
            connection.close()
            raise ConnectionError(str(error)) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _proven(
    connection: socket.socket, *, rank: int, peer: int, proof: Proof, receive: "_Receive"
) -> socket.socket:
    peer_nonce, nonce = receive(NONCE_BYTES), new_nonce()
    own_proof = proof(rank, peer, nonces=peer_nonce + nonce)
    connection.sendall(_RANK.pack(rank) + nonce + own_proof)
    if not proves(receive(PROOF_BYTES), proof(peer, rank, nonces=nonce + peer_nonce)):
        raise Stranger
    return connection


class _Receive:
    """Receives exactly as many bytes as asked for."""

    def __init__(
        self, connection: socket.socket, deadline: float, is_cancelled: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._deadline = deadline
        self._is_cancelled = is_cancelled
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def __call__(self, size: int) -> bytes:
        """Raises ConnectionError or TimeoutError."""
        received = b""
        while len(received) < size:
            left_s = _left_s(self._deadline, self._is_cancelled)
            if not self._readable.poll(int(min(left_s, _POLL_S) * 1e3) + 1):
                continue
            try:
                chunk = self._connection.recv(size - len(received))
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not chunk:
                raise ConnectionError("the connection was closed by the peer")
            received += chunk
        return received


def _left_s(deadline: float, is_cancelled: Callable[[], bool]) -> float:
    """Returns the time until the deadline. Raises ConnectionError or TimeoutError."""
    if is_cancelled():
        raise ConnectionError("joining was cancelled")
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _split(content: bytes) -> tuple[bytes, bytes]:
    """Returns a nonce and a proof."""
    return content[:NONCE_BYTES], content[NONCE_BYTES:]
