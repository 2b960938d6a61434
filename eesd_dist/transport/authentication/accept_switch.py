"""Decides without privileges when a library accepts connections at its listening socket.

For users without the right to packet filters (`connection_filter`). The library watches its
socket with epoll, and the registration is this process's to change: taken out of the epoll set, the
socket is never accepted from; its connections wait in the kernel, to be cut. When the group is
connected the socket is closed for good, although the library offers no way to: a socket that
nothing can reach takes its file handle, and another one keeps its port.

Hosts are not told apart: between `admit` and `block` any host that reaches the port is accepted.
The caller compares those connections with what its peers report (`gloo.GlooPlane`) and has the
peers prove the secret of their epoch (`handshake`).
"""

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from eesd_dist.errors import EngineError

_ADD, _REMOVE, _READABLE = 1, 2, 1
_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "=I4xQ")
"""struct epoll_event, which is packed on x86-64 alone: events, and what the library gets back."""

_libc = ctypes.CDLL(None, use_errno=True)


class AcceptSwitch:
    """The switch of one listening socket. Nothing is accepted at first."""

    def __init__(self, handle: int) -> None:
        """`handle`: the file handle under which the library knows the socket."""
        self._handle = handle
        self._epoll, self._data = _registration(handle)
        _control(self._epoll, _REMOVE, handle)
        self._listener = socket.socket(fileno=os.dup(handle))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """The IP address and the port at which the socket listens."""
        self._held = socket.socket(self._listener.family)
        """Keeps the port when the socket no longer listens: later sockets would be taken for it."""
        self._num_dropped = 0

    @property
    def num_dropped(self) -> int:
        """Connections cut that came before `admit`. After `block` the kernel refuses connections,
        and does not count them."""
        return self._num_dropped

    def cut_waiting(self) -> bool:
        """Cuts the connections that were not accepted; returns whether there were any."""
        num_before = self._num_dropped
        with suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()
                self._num_dropped += 1
        return self._num_dropped > num_before

    def admit(self, hosts: Iterable[str]) -> None:
        """Cuts the connections that came so far, since no peer connects before this, and lets the
        library accept from any host. `hosts` are not told apart."""
        self.cut_waiting()
        _control(self._epoll, _ADD, self._handle, events=_READABLE, data=self._data)

    def block(self) -> None:
        """Closes the socket. Accepted connections go on.

        The library may be about to accept, so a socket that listens takes the handle; and it may
        remove the handle from its epoll set later, so the handle is there."""
        _control(self._epoll, _REMOVE, self._handle)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as empty:
            empty.bind("")  # to a free name; nothing looks for connections to it
            empty.listen(1)
            os.dup2(empty.fileno(), self._handle, inheritable=False)
        _control(self._epoll, _ADD, self._handle)
        self._listener.shutdown(socket.SHUT_RDWR)  # for a forked child's handles, too
        self._listener.close()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # the port is another process's by now
            self._held.bind(self.address)

    def release(self) -> None:
        os.close(self._epoll)
        self._listener.close()
        self._held.close()


def _registration(handle: int) -> tuple[int, int]:
    """Returns a duplicate of the epoll set that watches this socket, and the set's data for it.
    Raises EngineError."""
    inode = os.fstat(handle).st_ino
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            if "eventpoll" not in os.readlink(f"/proc/self/fd/{name}"):
                continue
            for line in Path(f"/proc/self/fdinfo/{name}").read_text(encoding="ascii").splitlines():
                match line.replace(":", " ").split():
                    case ["tfd", watched, "events", _, "data", data, "pos", _, "ino", of, *_] if (
                        int(watched) == handle and int(of, 16) == inode
                    ):
                        return os.dup(int(name)), int(data, 16)
    raise EngineError(
        "no epoll set watches the listening socket of this group (/proc/self/fdinfo): strangers "
        "cannot be kept out; let the user of this process attach packet filters (SO_ATTACH_FILTER)"
    )


def _control(epoll: int, operation: int, handle: int, *, events: int = 0, data: int = 0) -> None:
    if _libc.epoll_ctl(epoll, operation, handle, _EVENT.pack(events, data)):
        raise EngineError(
            f"a listening socket cannot be switched (epoll_ctl): {os.strerror(ctypes.get_errno())}"
        )
