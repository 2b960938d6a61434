"""Faults: a severed connection is severed at both ends, and no other one is touched."""

import asyncio
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.workers.messages import ProcessInfo
from serve_app.bench.chaos.reach import SignalsByCommand, deafen, run_command, sever

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="connections are found in /proc: Linux only"
)

_CALLER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(b"here")
print(connection.recv(1) or "severed", flush=True)
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_two_processes_are_disconnected_and_a_third_is_not(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} on this machine")
        listener.listen()
        port = listener.getsockname()[1]
        callers = [
            subprocess.Popen(
                [sys.executable, "-c", _CALLER, host, str(port)], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        ends = {}
        for _ in callers:
            connection, _ = listener.accept()
            assert connection.recv(4) == b"here"
            ends[connection.getpeername()[1]] = connection
        try:
            assert sever(callers[0].pid, callers[1].pid) == 0
            try:
                assert sever(callers[0].pid, os.getpid()) == 1
            except PermissionError as error:
                pytest.skip(f"this machine does not let root take over sockets: {error}")
            assert callers[0].communicate(timeout=10)[0].strip() == "severed"
            assert callers[1].poll() is None
            closed = []
            for connection in ends.values():
                connection.settimeout(0.2)
                try:
                    closed.append(connection.recv(1) == b"")
                except TimeoutError:
                    closed.append(False)
            assert sorted(closed) == [False, True]
        finally:
            for caller in callers:
                caller.kill()
                caller.communicate()
            for connection in ends.values():
                connection.close()


def test_a_command_of_the_operators_is_told_host_pid_and_signal(tmp_path: Path) -> None:
    file = tmp_path / "said"
    script = f"open({str(file)!r}, 'w').write(' '.join(__import__('sys').argv[1:]))"
    command = f'{sys.executable} -c "{script}" {{host}} {{pid}} {{signal}}'
    at = ProcessInfo(pid=12, host="10.0.0.7", node_id="n")
    assert asyncio.run(SignalsByCommand(command).send(signal.SIGKILL, to=at))
    assert file.read_text() == "10.0.0.7 12 KILL"


def test_a_command_that_fails_is_reported_with_its_own_words() -> None:
    script = "raise SystemExit('no route to {host}')"
    with pytest.raises(EngineError, match=r"ended with 1: no route to h1"):
        asyncio.run(run_command(f'{sys.executable} -c "{script}"', host="h1"))


def test_a_command_with_an_unknown_blank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"may name \{host\}"):
        asyncio.run(run_command("ip link set {device} down", host="h1"))


_READER = """
import select, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
poll = select.epoll()
poll.register(connection, select.EPOLLIN)
for _ in sys.stdin:
    print(len(connection.recv(1000)) if poll.poll(0.5) else 0, flush=True)
"""


def test_a_deaf_process_reads_nothing_and_its_kernel_takes_everything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", _READER, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def num_read() -> int:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("?\n")
                process.stdin.flush()
                return int(process.stdout.readline())

            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"one")
                assert num_read() == 3
                try:
                    assert deafen(process.pid, os.getpid()) == 1
                except PermissionError as error:
                    pytest.skip(f"this machine does not let root take over sockets: {error}")
                connection.sendall(b"two")
                assert num_read() == 0
                time.sleep(0.2)  # the kernel may acknowledge late
                unsent = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
                assert unsent == (0,), "all is acknowledged"
            process.kill()
