"""Decides in the kernel which hosts may connect to a listening socket.

Gloo accepts any connection, takes the first 8 bytes for the number of a pair, and cannot close
its listening socket while a group lives. So the socket gets a packet filter (SO_ATTACH_FILTER,
classic BPF; needs no privileges): nothing passes before the members of the group are known, then
only packets from their hosts, and nothing once the group is connected. Accepted connections keep
the filter that they were accepted under.
"""

import ctypes
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterable

from eesd_dist.errors import EngineError

_SO_ATTACH_FILTER = 26
_SO_MEMINFO = 55
_DROPS = 8
"""Index in the array that SO_MEMINFO returns."""

_INFO_BYTES = 32
_WAITING, _WAITING_AT = struct.Struct("=I"), 24
"""The field `tcpi_unacked` of what TCP_INFO returns; of a listening socket it is the backlog."""

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


class ConnectionFilter:
    """The filter on one listening socket. It admits nothing at first."""

    def __init__(self, listener: socket.socket) -> None:
        """Owns `listener`, which may be a duplicate."""
        self._listener = listener
        self.block()

    @property
    def num_dropped(self) -> int:
        """Packets dropped so far: one for each attempt to connect, and one for each repetition."""
        words = struct.unpack("=9I", self._listener.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36))
        return int(words[_DROPS])

    @property
    def num_waiting(self) -> int:
        """Established connections that have not been accepted yet."""
        info = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return int(_WAITING.unpack_from(info, _WAITING_AT)[0])

    def block(self) -> None:
        """Lets nothing pass. Accepted connections go on."""
        self._attach([_DROP])

    def admit(self, hosts: Iterable[str]) -> None:
        """Lets packets from these IP addresses pass; of other hosts not even the end of a handshake
        that began before there was a filter."""
        program = [each for host in sorted(set(hosts)) for each in _pass_from(host)]
        self._attach([*program, _DROP])

    def release(self) -> None:
        self._listener.close()

    def _attach(self, program: list[_Instruction]) -> None:
        code = b"".join(struct.pack("=HBBI", *each) for each in program)
        held = ctypes.create_string_buffer(code, len(code))
        pointer = struct.pack("@HP", len(program), ctypes.addressof(held))
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)
        except OSError as error:
            raise EngineError(
                f"no packet filter on a listening socket (SO_ATTACH_FILTER): {error}; ranks need a "
                "kernel that has them"
            ) from error


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
