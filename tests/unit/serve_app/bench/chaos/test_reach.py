"""Faults: a severed connection is severed at both ends, and no other one is touched."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.workers.messages import ProcessInfo
from serve_app.bench.chaos.reach import SignalsByCommand, ThreadStopper, run_command, sever

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
                pytest.skip(f"this machine lets nobody take over sockets: {error}")
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
    said = tmp_path / "said"
    script = f"open({str(said)!r}, 'w').write(' '.join(__import__('sys').argv[1:]))"
    command = f'{sys.executable} -c "{script}" {{host}} {{pid}} {{signal}}'
    at = ProcessInfo(pid=12, host="10.0.0.7", node_id="n")
    assert asyncio.run(SignalsByCommand(command).send(signal.SIGKILL, to=at))
    assert said.read_text() == "10.0.0.7 12 KILL"


def test_a_command_that_fails_is_reported_with_its_own_words() -> None:
    script = "raise SystemExit('no route to {host}')"
    with pytest.raises(EngineError, match=r"ended with 1: no route to h1"):
        asyncio.run(run_command(f'{sys.executable} -c "{script}"', host="h1"))


def test_a_command_with_an_unknown_blank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"may name \{host\}"):
        asyncio.run(run_command("ip link set {device} down", host="h1"))


_TWO_THREADS = """
import sys, threading, time
from eesd_dist.workers.loop import _name_thread
counts = [0, 0]
def count(which):
    if which == 1:
        _name_thread("eesd-loop")
    while True:
        counts[which] += 1
        time.sleep(0.005)
for which in (0, 1):
    threading.Thread(target=count, args=(which,), daemon=True).start()
for _ in sys.stdin:
    print(*counts, flush=True)
"""


def test_one_thread_stands_still_while_the_others_of_its_process_go_on() -> None:
    stopper = ThreadStopper()
    with subprocess.Popen(
        [sys.executable, "-c", _TWO_THREADS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def counts() -> tuple[int, ...]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("?\n")
            process.stdin.flush()
            return tuple(map(int, process.stdout.readline().split()))

        def has_gone_on(which: int) -> bool:
            before = counts()[which]
            time.sleep(0.5)
            return counts()[which] > before

        assert has_gone_on(1)
        assert not stopper.stop(process.pid, "another")
        assert stopper.stop(process.pid, "eesd-loop")
        assert has_gone_on(0)
        assert not has_gone_on(1)
        stopper.resume()
        assert has_gone_on(1)
        process.kill()


def test_a_thread_of_a_process_that_has_gone_cannot_be_stopped() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not ThreadStopper().stop(process.pid, "eesd-loop")
