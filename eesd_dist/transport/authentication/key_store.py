"""A store of keys and values for one rendezvous, and the ranks' connections to it.

The host answers only connections that prove the secret of its address (`handshake`); it serves all
of them in one thread that never waits for any of them, so a connection that stays silent delays
nothing. Such a connection is cut and counted after `_PROOF_WITHIN_S`.
"""

import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder

from eesd_dist.errors import PeerLost
from eesd_dist.transport.authentication.connection_filter import LISTENING
from eesd_dist.transport.authentication.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    Address,
    host_proof,
    new_nonce,
    new_secret,
    proves,
    rank_proof,
)
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.contracts import Record

_PROOF_WITHIN_S = 2.0
"""A rank that a busy machine delays for longer connects again."""
_MAX_UNPROVEN = 64
"""Connections without a proof at a time; the oldest is cut for one more."""
_MAX_MESSAGE_BYTES = 1 << 20
_RETRY_S = 0.1
_GRACE_S = 0.3
"""Time for the host to say that a key is missing, before it is taken for lost."""
_LENGTH = struct.Struct("!I")


class _Put(Record, frozen=True, tag="put"):
    key: str
    value: bytes


class _Get(Record, frozen=True, tag="get"):
    keys: tuple[str, ...]
    timeout_s: float


class _Found(Record, frozen=True):
    values: tuple[bytes, ...]
    missing: tuple[str, ...] = ()


_encode = Encoder().encode
_requests = Decoder(_Put | _Get)
_replies = Decoder(_Found)


class KeysMissing(Exception):
    """Keys that no rank had set in time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        super().__init__(f"not set in time: {', '.join(keys)}")
        self.keys = keys


class StoreHost:
    """Owns the store: keep it while groups are being built. It listens on `address` alone."""

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        refusals: RefusedConnections | None = None,
    ) -> None:
        family, *_, bound = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with LISTENING:
            listener = socket.create_server(bound[:2], family=family)
        self.at = Address(host=address, port=listener.getsockname()[1], secret=new_secret())
        self.refusals = refusals or RefusedConnections()
        wake, woken = socket.socketpair()
        server = _Server(listener, woken, self.at, self.refusals)
        threading.Thread(target=server.run, name="rendezvous store", daemon=True).start()
        weakref.finalize(self, wake.close)


class StoreClient:
    """A rank's connection to a store. Requests are for one thread at a time; `close` is not."""

    def __init__(self, at: Address) -> None:
        self.at = at
        self._socket = socket.socket()
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def connect(self, *, timeout_s: float) -> None:
        """Tries until the host has proved the secret too. Raises PeerLost."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._introduce(deadline)
            except _SecretRefused as error:
                raise self._lost(str(error)) from error
            except TimeoutError as error:
                raise self._lost(f"no answer within {timeout_s:g} s") from error
            except OSError as error:
                if self._closed.is_set():
                    raise self._lost("the connection was closed here") from error
                if deadline - time.monotonic() <= _RETRY_S:
                    reason = f"not reachable within {timeout_s:g} s ({error})"
                    raise self._lost(reason) from error
                self._closed.wait(_RETRY_S)

    def put(self, key: str, value: bytes) -> None:
        """Raises OSError when the store is lost."""
        with self._lock:
            self._send(_Put(key, value))

    def get(self, *keys: str, timeout_s: float) -> tuple[bytes, ...]:
        """Returns the values once all are set. Raises KeysMissing, OSError when the store is
        lost."""
        with self._lock, self._usable_after_this():
            self._socket.settimeout(timeout_s + _GRACE_S)
            self._send(_Get(keys, timeout_s))
            (size,) = _LENGTH.unpack(_receive(self._socket, _LENGTH.size))
            reply = _replies.decode(_receive(self._socket, size))
        if reply.missing:
            raise KeysMissing(reply.missing)
        return reply.values

    def close(self) -> None:
        """Ends the requests in progress. From any thread."""
        self._closed.set()
        _cut(self._socket)

    def __del__(self) -> None:
        self._socket.close()

    def _introduce(self, deadline: float) -> None:
        family, *_, address = socket.getaddrinfo(
            self.at.host, self.at.port, type=socket.SOCK_STREAM
        )[0]
        self._socket.close()
        self._socket = socket.socket(family)
        if self._closed.is_set():
            raise ConnectionError("closed")
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        self._socket.connect(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonces = {"host_nonce": _receive(self._socket, NONCE_BYTES), "rank_nonce": new_nonce()}
        proof = rank_proof(self.at.secret, **nonces)
        self._socket.sendall(nonces["rank_nonce"] + proof)
        answer = _receive(self._socket, PROOF_BYTES)
        if not proves(answer, host_proof(self.at.secret, **nonces)):
            raise _SecretRefused(answer)

    @contextmanager
    def _usable_after_this(self) -> Iterator[None]:
        """Closes the connection when an answer did not come: the next would be taken for it."""
        try:
            yield
        except BaseException:
            self._socket.close()
            raise

    def _send(self, message: _Put | _Get) -> None:
        if self._closed.is_set():
            raise ConnectionError("the connection was closed here")
        self._socket.sendall(_framed(message))

    def _lost(self, reason: str) -> PeerLost:
        peer = f"the rendezvous store at {self.at.host}:{self.at.port}"
        return PeerLost(peer=peer, operation="connecting", reason=reason)


class _SecretRefused(Exception):
    def __init__(self, answer: bytes) -> None:
        super().__init__(
            "it refused the secret, which is that of another epoch"
            if answer == REFUSED
            else "it does not know the secret of the epoch"
        )


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to the host."""

    link: socket.socket
    host: str
    nonce: bytes
    proves_until_s: float
    received: bytes = b""
    is_proven: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request for keys that are not all set."""

    peer: _Peer
    keys: tuple[str, ...]
    until_s: float


class _Server:
    """Serves a store in one thread, until the other end of `woken` is closed."""

    def __init__(
        self,
        listener: socket.socket,
        woken: socket.socket,
        at: Address,
        refusals: RefusedConnections,
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._woken = woken
        self._at = at
        self._refusals = refusals
        self._values: dict[str, bytes] = {}
        self._peers: dict[socket.socket, _Peer] = {}
        """Peers in the order in which they connected."""
        self._waiting: list[_Waiting] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while self._serve():
                pass
        finally:
            for link in (self._listener, self._woken, *self._peers):
                link.close()
            self._selector.close()

    def _serve(self) -> bool:
        """Waits for the next events. Returns False when the store has ended."""
        for key, _ in self._selector.select(self._left_s()):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._read(peer)
        self._expire()
        return True

    def _left_s(self) -> float | None:
        """Returns the time until the next deadline."""
        ends = [request.until_s for request in self._waiting]
        ends += [peer.proves_until_s for peer in self._unproven()]
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def _unproven(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if not peer.is_proven]

    def _accept(self) -> None:
        try:
            link, from_ = self._listener.accept()
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has left again, or this process has no file handle to spare
            self._refuse(self._unproven()[:1], "too many connections")
            time.sleep(_RETRY_S)
            return
        self._refuse(self._unproven()[: 1 - _MAX_UNPROVEN], "too many connections")
        until_s = time.monotonic() + _PROOF_WITHIN_S
        peer = _Peer(link, from_[0], new_nonce(), until_s)
        self._peers[link] = peer
        self._selector.register(link, selectors.EVENT_READ)
        self._send(peer, peer.nonce)

    def _read(self, peer: _Peer) -> None:
        max_bytes = 1 << 16 if peer.is_proven else NONCE_BYTES + PROOF_BYTES - len(peer.received)
        try:
            content = peer.link.recv(max_bytes)
        except OSError:
            content = b""
        if not content:
            self._leave(peer)
            return
        peer.received += content
        if peer.is_proven:
            self._answer(peer)
        elif len(peer.received) == NONCE_BYTES + PROOF_BYTES:
            self._judge(peer)

    def _leave(self, peer: _Peer) -> None:
        if peer.is_proven:
            self._forget(peer)
        else:
            self._refuse([peer], "it left without a proof of the secret")

    def _judge(self, peer: _Peer) -> None:
        nonces = {"host_nonce": peer.nonce, "rank_nonce": peer.received[:NONCE_BYTES]}
        proof, peer.received = peer.received[NONCE_BYTES:], b""
        if proves(proof, rank_proof(self._at.secret, **nonces)):
            peer.is_proven = True
            self._send(peer, host_proof(self._at.secret, **nonces))
        else:
            self._send(peer, REFUSED)
            self._refuse([peer], "wrong secret")

    def _answer(self, peer: _Peer) -> None:
        try:
            for request in _complete_messages(peer):
                if isinstance(request, _Put):
                    self._values[request.key] = request.value
                else:
                    until_s = time.monotonic() + request.timeout_s
                    self._waiting.append(_Waiting(peer, request.keys, until_s))
        except DecodeError:
            self._forget(peer)
        self._settle()

    def _settle(self) -> None:
        """Answers the requests for keys that are all set."""
        for request in [request for request in self._waiting if not self._missing(request)]:
            self._waiting.remove(request)
            values = tuple(self._values[key] for key in request.keys)
            self._send(request.peer, _framed(_Found(values)))

    def _missing(self, request: _Waiting) -> tuple[str, ...]:
        return tuple(key for key in request.keys if key not in self._values)

    def _expire(self) -> None:
        time_s = time.monotonic()
        for request in [request for request in self._waiting if request.until_s <= time_s]:
            self._waiting.remove(request)
            self._send(request.peer, _framed(_Found((), self._missing(request))))
        expired = [peer for peer in self._unproven() if peer.proves_until_s <= time_s]
        self._refuse(expired, f"no proof of the secret within {_PROOF_WITHIN_S:g} s")

    def _send(self, peer: _Peer, content: bytes) -> None:
        """Sends a small message, or cuts the connection of a peer that does not take it."""
        try:
            is_complete = peer.link.send(content) == len(content)
        except OSError:
            is_complete = False
        if not is_complete:
            self._leave(peer)

    def _refuse(self, peers: Sequence[_Peer], reason: str) -> None:
        for peer in peers:
            if self._forget(peer):
                at = f"{self._at.host}:{self._at.port}"
                self._refusals.add(peer.host, at=at, reason=reason)

    def _forget(self, peer: _Peer) -> bool:
        """Returns False for a peer that is forgotten already."""
        if self._peers.pop(peer.link, None) is None:
            return False
        self._waiting = [request for request in self._waiting if request.peer is not peer]
        self._selector.unregister(peer.link)
        peer.link.close()
        return True


def _complete_messages(peer: _Peer) -> Iterator[_Put | _Get]:
    """Takes the complete messages out of what was received. Raises DecodeError."""
    while len(peer.received) >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(peer.received)
        if size > _MAX_MESSAGE_BYTES:
            raise DecodeError(f"found a message of {size} bytes")
        end = _LENGTH.size + size
        if len(peer.received) < end:
            return
        message, peer.received = peer.received[_LENGTH.size : end], peer.received[end:]
        yield _requests.decode(message)


def _framed(message: Record) -> bytes:
    content = _encode(message)
    return _LENGTH.pack(len(content)) + content


def _receive(link: socket.socket, size: int) -> bytes:
    """Receives exactly `size` bytes. Raises OSError."""
    received = bytearray()
    while len(received) < size:
        if not (chunk := link.recv(size - len(received))):
            raise ConnectionError("the connection was closed")
        received += chunk
    return bytes(received)


def _cut(link: socket.socket) -> None:
    with suppress(OSError):  # not connected
        link.shutdown(socket.SHUT_RDWR)
