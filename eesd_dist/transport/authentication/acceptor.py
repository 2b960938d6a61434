"""Connections that have not proved a secret yet, served without waiting for any of them.

The accepting end sends a nonce first; the other end answers with its hello, in which its proof is.
A connection that stays silent delays nothing: it is cut and counted after `_PROOF_WITHIN_S`, or
when too many are open. So a flood costs its own connections first, but may delay a rank, which
connects again.
"""

import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from eesd_dist.transport.authentication.handshake import new_nonce
from eesd_dist.transport.authentication.refused import RefusedConnections

SocketAddress = tuple[str, int]

_PROOF_WITHIN_S = 2.0
"""A rank that a busy machine delays for longer connects again."""
_MAX_UNPROVEN = 64
"""Connections without a proof at a time; the oldest is cut for one more."""
_PAUSE_S = 0.1


@dataclass(slots=True, eq=False)
class Unproven:
    """A connection to a process that is not known yet."""

    connection: socket.socket
    host: str
    nonce: bytes
    until_s: float
    hello: bytes = b""

    def send(self, content: bytes) -> bool:
        """Sends a small message; returns False if the other end does not take it."""
        try:
            return self.connection.send(content) == len(content)
        except OSError:
            return False


class Acceptor:
    """Accepts connections for an owner that runs the selector and judges their hellos."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        hello_bytes: int,
        refusals: RefusedConnections,
    ) -> None:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        self._selector = selector
        self._hello_bytes = hello_bytes
        self._refusals = refusals
        self._at = "{}:{}".format(*listener.getsockname()[:2])
        self._unproven: dict[object, Unproven] = {}
        """Connections by their sockets, in the order in which they came."""

    def serve(self, ready: object) -> Unproven | None:
        """Handles what the selector has reported, unless it is not a connection of this acceptor.
        Returns the connection that has sent its whole hello: the owner takes or refuses it."""
        if ready is self._listener:
            self._accept()
            return None
        candidate = self._unproven.get(ready)
        return candidate if candidate is not None and self._read(candidate) else None

    def take(self, candidate: Unproven) -> socket.socket:
        """Returns the connection of a proven end, which belongs to the owner from now on."""
        del self._unproven[candidate.connection]
        self._selector.unregister(candidate.connection)
        return candidate.connection

    def refuse(self, candidate: Unproven, reason: str) -> None:
        self._refusals.add(candidate.host, at=self._at, reason=reason)
        self.take(candidate).close()

    @property
    def until_s(self) -> float | None:
        """Monotonic time at which `expire` has something to do; None: no such time."""
        return min((candidate.until_s for candidate in self._unproven.values()), default=None)

    def expire(self) -> None:
        time_s = time.monotonic()
        self._refuse_all(
            [candidate for candidate in self._unproven.values() if candidate.until_s <= time_s],
            f"no proof of the secret within {_PROOF_WITHIN_S:g} s",
        )

    def close(self) -> None:
        """Stops listening, and cuts the connections without a proof."""
        self._listener.close()
        self._refuse_all(list(self._unproven.values()), "no proof of the secret in time")

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has left, or this process has no file handle to spare
            self._cut_oldest(max_unproven=len(self._unproven) - 1)
            time.sleep(_PAUSE_S)
            return
        self._cut_oldest(max_unproven=_MAX_UNPROVEN - 1)
        until_s = time.monotonic() + _PROOF_WITHIN_S
        candidate = Unproven(connection, host, new_nonce(), until_s)
        self._unproven[connection] = candidate
        self._selector.register(connection, selectors.EVENT_READ)
        if not candidate.send(candidate.nonce):
            self._refuse_absent(candidate)

    def _cut_oldest(self, *, max_unproven: int) -> None:
        num_cut = max(len(self._unproven) - max(max_unproven, 0), 0)
        self._refuse_all(list(self._unproven.values())[:num_cut], "too many connections")

    def _read(self, candidate: Unproven) -> bool:
        """Returns whether the hello is complete."""
        try:
            content = candidate.connection.recv(self._hello_bytes - len(candidate.hello))
        except OSError:
            content = b""
        if not content:
            self._refuse_absent(candidate)
            return False
        candidate.hello += content
        return len(candidate.hello) == self._hello_bytes

    def _refuse_absent(self, candidate: Unproven) -> None:
        self.refuse(candidate, "it left without a proof of the secret")

    def _refuse_all(self, candidates: Iterable[Unproven], reason: str) -> None:
        for candidate in candidates:
            self.refuse(candidate, reason)


def listen(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens on this address alone."""
    family, *_, bound = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(bound[:2], family=family)
