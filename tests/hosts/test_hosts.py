"""The hosts are separate, reachable, cut off and removed completely."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, HostsError, down

_ANSWERS = """
import socket
server = socket.create_server(("", 7000))
print("listening", flush=True)
while True:
    connection, peer = server.accept()
    with connection:
        connection.sendall(peer[0].encode())
"""
_ASKS = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=10) as connection:
    print(connection.recv(100).decode())
"""


@pytest.fixture
def pair() -> Iterator[Hosts]:
    with Hosts(2, prefix="eesdz", subnet="10.77.12") as hosts:
        yield hosts


def _answering(hosts: Hosts, host: int) -> "subprocess.Popen[str]":
    server = hosts.run(host, [sys.executable, "-c", _ANSWERS], output=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    server.stdout.close()
    return server


def _ask_from_here(address: str) -> str:
    with socket.create_connection((address, 7000), timeout=0.3) as connection:
        return connection.recv(100).decode()


def test_a_host_is_reached_from_another_one_and_from_this_machine(pair: Hosts) -> None:
    _answering(pair, 1)
    asking = pair.run(0, [sys.executable, "-c", _ASKS, pair.address(1)], output=subprocess.PIPE)
    assert asking.communicate(timeout=20)[0] == f"{pair.address(0)}\n"
    assert _answer_in_the_end(pair.address(1)) == "10.77.12.1"


def test_the_same_port_on_two_hosts_is_two_ports(pair: Hosts) -> None:
    _answering(pair, 0)
    _answering(pair, 1)
    for host in range(2):
        assert _answer_in_the_end(pair.address(host)) == "10.77.12.1"


def test_a_host_that_is_cut_off_is_silent_until_the_link_is_mended(pair: Hosts) -> None:
    server = _answering(pair, 1)
    pair.cut(1)
    with pytest.raises(OSError, match=r"timed out|unreachable|No route"):
        _ask_from_here(pair.address(1))
    assert server.poll() is None  # its processes do not notice
    pair.mend(1)
    assert _answer_in_the_end(pair.address(1)) == "10.77.12.1"


def _answer_in_the_end(address: str) -> str:
    deadline = time.monotonic() + 10
    while True:
        try:
            return _ask_from_here(address)
        except OSError:
            assert time.monotonic() < deadline


def test_a_process_has_one_pid_and_one_host(pair: Hosts) -> None:
    sleeper = pair.run(1, ["sleep", "100"])
    while sleeper.pid not in pair.pids(1):
        time.sleep(0.01)
    assert pair.host_of(sleeper.pid) == 1
    with pytest.raises(HostsError, match="runs on none of the 2 hosts"):
        pair.host_of(os.getpid())


def test_killing_a_host_ends_its_processes_and_no_others(pair: Hosts) -> None:
    local = pair.run(0, ["sleep", "100"])
    remote = pair.run(1, ["sh", "-c", "sleep 100 & sleep 100"])
    while len(pair.pids(1)) < 3:
        time.sleep(0.01)
    pair.kill_host(1)
    assert remote.wait(5) == -signal.SIGKILL
    assert pair.pids(1) == set()
    assert local.poll() is None


def test_what_a_crash_has_left_is_removed_and_removing_it_twice_is_fine() -> None:
    crashed = Hosts(2, prefix="eesdz", subnet="10.77.12")
    crashed.up()
    sleeper = crashed.run(0, ["sleep", "100"])
    for _ in range(2):
        down("eesdz")
    assert sleeper.wait(5) == -signal.SIGKILL
    left = [*Path("/run/netns").glob("eesdz*"), *Path("/etc").glob("netns/eesdz*")]
    assert left == []
    assert not Path("/sys/class/net/eesdzleg").exists()
    assert not crashed.folder.exists()
