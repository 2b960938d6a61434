"""A store of keys and values for one rendezvous, and the ranks' connections to it.

The host answers only connections that prove the secret of its address (`handshake`, `acceptor`); it
serves all of them in one thread that never waits for any of them.
"""

import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder

from eesd_dist.errors import PeerLost
from eesd_dist.transport.authentication.acceptor import Acceptor, Unproven, listen
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
        listener = listen(address, port)
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

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Ends the requests in progress, and the joining of a group. From any thread."""
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
    """A rank's connection to the host."""

    link: socket.socket
    received: bytes = b""


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
        self._woken = woken
        self._at = at
        self._values: dict[str, bytes] = {}
        self._peers: dict[object, _Peer] = {}
        """Ranks by their sockets."""
        self._waiting: list[_Waiting] = []
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            listener, self._selector, hello_bytes=NONCE_BYTES + PROOF_BYTES, refusals=refusals
        )

    def run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while self._serve():
                pass
        finally:
            self._acceptor.close()
            for peer in self._peers.values():
                peer.link.close()
            self._woken.close()
            self._selector.close()

    def _serve(self) -> bool:
        """Waits for the next events. Returns False when the store has ended."""
        for key, _ in self._selector.select(self._left_s()):
            if key.fileobj is self._woken:
                return False
            if (peer := self._peers.get(key.fileobj)) is not None:
                self._read(peer)
            elif (candidate := self._acceptor.serve(key.fileobj)) is not None:
                self._judge(candidate)
        self._acceptor.expire()
        self._expire()
        return True

    def _left_s(self) -> float | None:
        """Returns the time until the next deadline."""
        ends = [request.until_s for request in self._waiting]
        if self._acceptor.until_s is not None:
            ends.append(self._acceptor.until_s)
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def _read(self, peer: _Peer) -> None:
        try:
            content = peer.link.recv(1 << 16)
        except OSError:
            content = b""
        if not content:
            self._forget(peer)
            return
        peer.received += content
        self._answer(peer)

    def _judge(self, candidate: Unproven) -> None:
        rank_nonce, proof = candidate.hello[:NONCE_BYTES], candidate.hello[NONCE_BYTES:]
        nonces = {"host_nonce": candidate.nonce, "rank_nonce": rank_nonce}
        if not proves(proof, rank_proof(self._at.secret, **nonces)):
            candidate.send(REFUSED)
            self._acceptor.refuse(candidate, "wrong secret")
            return
        link = self._acceptor.take(candidate)
        peer = self._peers[link] = _Peer(link)
        self._selector.register(link, selectors.EVENT_READ)
        self._send(peer, host_proof(self._at.secret, **nonces))

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

    def _send(self, peer: _Peer, content: bytes) -> None:
        """Sends a small message, or cuts the connection of a peer that does not take it."""
        try:
            is_complete = peer.link.send(content) == len(content)
        except OSError:
            is_complete = False
        if not is_complete:
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if self._peers.pop(peer.link, None) is None:
            return
        self._waiting = [request for request in self._waiting if request.peer is not peer]
        self._selector.unregister(peer.link)
        peer.link.close()


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
