"""Processes that connect to what they can find and do not belong to any group; they import little,
to be quick."""

import errno
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Literal

Address = tuple[str, int]
Words = Literal["silent", "garbage", "wrong proof", "gone at once"]


def listening_ports(process_id: int) -> set[int]:
    """Returns the TCP ports at which this process listens on 127.0.0.1: others run tests, too."""
    inodes = {link[8:-1] for link in _links_of(process_id) if link.startswith("socket:[")}
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {
        int(row[1][9:], 16)
        for row in rows
        if row[3] == "0A" and row[1][:8] == "0100007F" and row[9] in inodes
    }


def _links_of(process_id: int) -> Iterator[str]:
    folder = f"/proc/{process_id}/fd"
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # closed since it was listed
            yield os.readlink(f"{folder}/{name}")


def scan(
    source: str, words: Words, victim: int, spared: Collection[int], reports: Connection
) -> None:
    """Connects from `source` to every port at which the process `victim` listens, except the spared
    ones, over and over, and says what it has to say; `told` hears when it has begun."""
    reports.send("scanning")
    links: list[socket.socket] = []
    while True:
        for port in listening_ports(victim) - set(spared):
            link = _connect(source, ("127.0.0.1", port))
            _speak(link, words)
            links.append(link)
        while len(links) > 200:
            links.pop(0).close()
        time.sleep(0.0005)


def _connect(source: str, target: Address) -> socket.socket:
    """Does not wait for the connection, which may never come about."""
    link = socket.socket()
    link.bind((source, 0))
    link.setblocking(False)
    assert link.connect_ex(target) in (0, errno.EINPROGRESS)
    return link


def _speak(link: socket.socket, words: Words) -> None:
    payloads = {"garbage": b"\xa5" * 999, "wrong proof": struct.pack("!I", 1) + bytes(64)}
    try:
        if words == "gone at once":
            link.close()
        elif words in payloads:
            link.send(payloads[words])
    except OSError:  # not connected
        return
