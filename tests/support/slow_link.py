"""A link slowed by a relay: frames between two hosts are held for a time, all others are not.

    with slowed(hosts, 1, 2, delay_s=0.02): ...

A host is unplugged from the bridge of `tests.support.hosts`; a process in the hub carries its
frames, Ethernet and all, and delays those between the two addresses. Programs on the hosts see an
ordinary interface: nothing of them is changed.
"""

import argparse
import heapq
import itertools
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.hosts import Hosts

_ALL_PROTOCOLS = socket.htons(3)
_SOL_PACKET, _ADD_MEMBERSHIP, _VNET_HDR, _PROMISCUOUS, _OUTGOING = 263, 1, 15, 1, 4
_VNET_BYTES = 10
"""Of the header in which the kernel passes on what a network card would do: checksums and cutting
of large frames."""
_MAX_FRAME = 2**17
_ADDRESSES = slice(_VNET_BYTES + 26, _VNET_BYTES + 34)
"""Source and destination in an IPv4 frame."""


@contextmanager
def slowed(hosts: Hosts, host: int, other: int, *, delay_s: float) -> Iterator[None]:
    """Slows the link between two hosts while the block runs; each direction has the delay."""
    port, gap = hosts.divert(host)
    words = ["-m", "tests.support.slow_link", port, gap]
    words += ["--between", hosts.address(host), hosts.address(other), "--delay-s", str(delay_s)]
    relay = hosts.run_in_hub([sys.executable, *words])
    try:
        _wait_until_carrying(hosts, host)
        yield
    finally:
        relay.kill()
        relay.wait()
        hosts.undo_divert(host)


def _wait_until_carrying(hosts: Hosts, host: int, *, timeout_s: float = 20.0) -> None:
    """Waits for the first answer through the relay."""
    deadline = time.monotonic() + timeout_s
    while not _is_reached(hosts.address(host)):
        assert time.monotonic() < deadline, f"the relay carries nothing within {timeout_s:g} s"


def _is_reached(address: str) -> bool:
    """A closed port refuses at once, which is an answer too."""
    try:
        socket.create_connection((address, 9), timeout=0.2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


class _Port:
    """One interface, from which frames come and to which frames go."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, _ALL_PROTOCOLS)
        self.socket.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
        self.socket.bind((name, 0))
        index = socket.if_nametoindex(name)
        request = struct.pack("IHH8s", index, _PROMISCUOUS, 0, b"")
        self.socket.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, request)

    def receive(self) -> bytes | None:
        """Returns a frame that has come in; None for one that this process has sent."""
        frame, (_, _, kind, *_) = self.socket.recvfrom(_MAX_FRAME)
        return None if kind == _OUTGOING else frame

    def send(self, frame: bytes) -> None:
        self.socket.send(frame)


def relay(names: Sequence[str], *, between: Sequence[str], delay_s: float) -> None:
    """Carries frames in both directions, for ever."""
    ports = [_Port(name) for name in names]
    first, second = (socket.inet_aton(address) for address in between)
    slow = {first + second, second + first}
    held: list[tuple[float, int, _Port, bytes]] = []
    number = itertools.count()
    with selectors.DefaultSelector() as selector:
        for port, opposite in zip(ports, reversed(ports), strict=True):
            selector.register(port.socket, selectors.EVENT_READ, (port, opposite))
        while True:
            wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
            for key, _ in selector.select(wait_s):
                port, opposite = key.data
                frame = port.receive()
                if frame is not None:
                    delay = delay_s if frame[_ADDRESSES] in slow else 0.0
                    due = time.monotonic() + delay
                    heapq.heappush(held, (due, next(number), opposite, frame))
            while held and held[0][0] <= time.monotonic():
                _, _, opposite, frame = heapq.heappop(held)
                opposite.send(frame)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.slow_link")
    parser.add_argument("interfaces", nargs=2)
    parser.add_argument("--between", nargs=2, required=True)
    parser.add_argument("--delay-s", type=float, required=True)
    options = parser.parse_args()
    # Nothing but the delay is to slow the frames, on a busy machine too.
    os.nice(-10)
    relay(options.interfaces, between=options.between, delay_s=options.delay_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
