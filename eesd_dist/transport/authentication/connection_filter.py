"""Decides in the kernel which hosts may connect to a listening socket.

Gloo accepts any connection, takes the first 8 bytes for the number of a pair, and cannot close
its listening socket while a group lives. So the socket gets a packet filter (SO_ATTACH_FILTER,
classic BPF): nothing passes before the members of the group are known, then only packets from their
hosts, and nothing once the group is connected. Accepted connections keep the filter that they were
accepted under. Some kernels and sandboxes deny the option to ordinary users (`filter_denial`):
their sockets are guarded by when the library accepts (`accept_switch`).
"""

import ctypes
import ipaddress
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Protocol

from eesd_dist.errors import EngineError
from eesd_dist.transport.authentication.accept_switch import AcceptSwitch

_SO_ATTACH_FILTER = 26
_SO_MEMINFO = 55
_DROPS = 8
"""Index in the array that SO_MEMINFO returns."""

_INFO_BYTES = 32
_WAITING, _WAITING_AT = struct.Struct("=I"), 24
"""The field `tcpi_unacked` of what TCP_INFO returns; of a listening socket it is the backlog."""

_ACCEPTED_WITHIN_MS = 1_000

_IP_HEADER = 0xFFF00000
"""Offset of the IP header (SKF_NET_OFF)."""
_LOAD_WORD, _JUMP_IF, _RETURN = 0x20, 0x15, 0x06
_ALL_BYTES = 0xFFFFFFFF

LISTENING = threading.Lock()
"""Held while a listening socket is opened: a device's socket is found by comparing the sockets
before and after. One that a library opens at that moment would be taken for the device's."""

_Instruction = tuple[int, int, int, int]
"""Code, distance of the jump if true and if false, operand."""
_DROP: _Instruction = (_RETURN, 0, 0, 0)
_PASS: _Instruction = (_RETURN, 0, 0, _ALL_BYTES)


_HANDLES_MORE = 256
"""The kernel gives a socket the lowest free handle, and other threads open some too."""

_libc = ctypes.PyDLL(None, use_errno=True)
"""The C library. Its calls keep the interpreter's lock. Python's own give it up, each time for 5 ms
when another thread computes: time in which a new socket listens without a filter."""


class Listeners:
    """The TCP sockets at which this process listens, to find one that a library opens."""

    def __init__(self) -> None:
        self._end = max(map(int, os.listdir("/proc/self/fd"))) + _HANDLES_MORE
        self._old_addresses = {address for address, _ in self._all()}

    def new(self) -> int:
        """Returns the file handle of the socket that was opened since. Raises OSError when there
        is none."""
        for address, handle in self._all():
            if address not in self._old_addresses:
                return handle
        raise OSError("no new listening socket")

    def _all(self) -> Iterator[tuple[bytes, int]]:
        """Yields the address, as the kernel writes it, and the file handle."""
        buffer, size = ctypes.create_string_buffer(128), ctypes.c_uint()
        families = {socket.AF_INET, socket.AF_INET6}
        for handle in range(self._end):
            size.value = 4
            listens = (handle, socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if _libc.getsockopt(*listens, buffer, ctypes.byref(size)) or buffer.raw[0] == 0:
                continue
            size.value = len(buffer)
            if _libc.getsockname(handle, buffer, ctypes.byref(size)) == 0:
                address = buffer.raw[: size.value]
                if int.from_bytes(address[:2], sys.byteorder) in families:
                    yield address, handle


class ConnectionFilter:
    """The filter on one listening socket. It admits nothing at first."""

    def __init__(self, handle: int) -> None:
        """`handle`: the file handle of the socket, of which this keeps a duplicate."""
        _attach(handle, [_DROP])
        self._listener = socket.socket(fileno=os.dup(handle))

    @property
    def address(self) -> tuple[str, int]:
        """The IP address and the port at which the socket listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def num_dropped(self) -> int:
        """Packets dropped so far: one for each attempt to connect, and one for each repetition."""
        words = struct.unpack("=9I", self._listener.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36))
        return int(words[_DROPS])

    def cut_waiting(self) -> bool:
        """Waits until the library has accepted the connections that came before the filter, for
        the caller to cut. Returns False: here none is cut."""
        for _ in range(_ACCEPTED_WITHIN_MS):
            if not self._num_waiting():
                break
            time.sleep(0.001)
        return False

    def block(self) -> None:
        """Lets nothing pass. Accepted connections go on."""
        _attach(self._listener.fileno(), [_DROP])

    def admit(self, hosts: Iterable[str]) -> None:
        """Lets packets from these IP addresses pass; of other hosts not even the end of a handshake
        that began before there was a filter."""
        program = [instruction for host in sorted(set(hosts)) for instruction in _pass_from(host)]
        _attach(self._listener.fileno(), [*program, _DROP])

    def release(self) -> None:
        self._listener.close()

    def _num_waiting(self) -> int:
        """Returns the number of established connections that have not been accepted yet."""
        info = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return int(_WAITING.unpack_from(info, _WAITING_AT)[0])


def _attach(handle: int, program: list[_Instruction]) -> None:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    pointer = struct.pack("@HP", len(program), ctypes.addressof(held))
    option = (handle, socket.SOL_SOCKET, _SO_ATTACH_FILTER)
    if _libc.setsockopt(*option, pointer, len(pointer)):
        raise EngineError(
            "no packet filter on a listening socket (SO_ATTACH_FILTER): "
            f"{os.strerror(ctypes.get_errno())}"
        )


def filter_denial() -> str | None:
    """Returns the kernel's error when it denies packet filters to this process, otherwise None."""
    with socket.socket() as probe:
        try:
            _attach(probe.fileno(), [_DROP])
        except EngineError:
            return os.strerror(ctypes.get_errno())
    return None


def _pass_from(host: str) -> list[_Instruction]:
    """Returns instructions that pass a packet with this source, and otherwise do nothing."""
    address = ipaddress.ip_address(host.partition("%")[0])
    first = 12 if address.version == 4 else 8  # offset of the source in the IP header
    words = [int.from_bytes(address.packed[at : at + 4]) for at in range(0, len(address.packed), 4)]
    program: list[_Instruction] = []
    for index, word in enumerate(words):
        to_the_end = 2 * (len(words) - 1 - index) + 1
        program.append((_LOAD_WORD, 0, 0, _IP_HEADER + first + 4 * index))
        program.append((_JUMP_IF, 0, to_the_end, word))
    return [*program, _PASS]


logger = logging.getLogger(__name__)


class ListenerGuard(Protocol):
    """A listening socket that admits nothing at first, and nothing any more after `block`."""

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def num_dropped(self) -> int: ...
    def cut_waiting(self) -> bool: ...
    def admit(self, hosts: Iterable[str]) -> None: ...
    def block(self) -> None: ...
    def release(self) -> None: ...


def guard_listener(handle: int) -> ListenerGuard:
    """Returns the guard of the socket with this file handle, which admits nothing yet."""
    return AcceptSwitch(handle) if _is_denied() else ConnectionFilter(handle)


@cache
def _is_denied() -> bool:
    """Finds out once for this process, and logs why packet filters are not used."""
    denial = filter_denial()
    if denial is not None:
        logger.warning(
            "no packet filters on listening sockets: option=SO_ATTACH_FILTER error=%s uid=%d "
            "instead=%s",
            denial, os.getuid(),
            "sockets are closed when a group is connected, and ranks prove the epoch's secret",
        )  # fmt: skip
    return denial is not None
