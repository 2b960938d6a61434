"""A session ends with the process that started it, and nothing else does."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from psutil import Process

from serve_app.service.watchdog import (
    Watchdog,
    end,
    end_session,
    haproxy_folder,
    logs_of,
    processes_of,
    ray_folder,
    running_after,
)
from tests.support.running import descendants

_SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
_WATCHED = f"""
import os, subprocess, sys, time
from pathlib import Path
from serve_app.service.watchdog import Watchdog, logs_of
folder, logs, file = map(Path, sys.argv[1:])
watchdog = Watchdog(folder, logs=logs)
watchdog.remove_at_end(file)
driver_log = (logs_of(folder) / "python-core-driver-1.log").open("w")
with (logs_of(folder) / "worker-1.out").open("w") as log:
    command = [sys.executable, "-c", {_SLEEPS!r}]
    child = subprocess.Popen(command, stdout=log, start_new_session=True)
print(watchdog._process.pid, child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a session, as Ray fills it."""
    folder = tmp_path / "session"
    session = ray_folder(folder) / "session_1"
    (session / "logs").mkdir(parents=True)
    (ray_folder(folder) / "session_latest").symlink_to(session)
    return folder


def test_a_haproxy_that_writes_no_log_of_ray_ends_too(folder: Path) -> None:
    configuration = haproxy_folder(folder) / "node" / "haproxy.cfg"
    command = [sys.executable, "-c", _SLEEPS, "-f", str(configuration)]
    other = [sys.executable, "-c", _SLEEPS, "-f", f"{haproxy_folder(folder)}-other/haproxy.cfg"]
    with subprocess.Popen(command) as haproxy, subprocess.Popen(other) as foreign:
        try:
            assert processes_of(folder) == {Process(haproxy.pid)}
            end_session(folder, logs=None, connection_files=[])
            assert haproxy.wait(5) == -signal.SIGKILL
            assert foreign.poll() is None
        finally:
            haproxy.kill()
            foreign.kill()


@pytest.fixture
def reader(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that reads a log, as an operator does, and writes a driver's log."""
    log = logs_of(folder) / "raylet.out"
    log.touch()
    with (
        log.open() as read,
        (logs_of(folder) / "python-core-driver-2.log").open("w") as written,
        subprocess.Popen([sys.executable, "-c", _SLEEPS], stdin=read, stdout=written) as process,
    ):
        yield process
        process.kill()


def _ignores(pid: int, number: signal.Signals) -> bool:
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    ]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_killed_process_takes_its_session_along_and_only_the_logs_stay(
    folder: Path, reader: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "ray").symlink_to(logs_of(folder))
    connection = tmp_path / "eesd" / "service-1.json"
    connection.parent.mkdir()
    connection.touch()
    with subprocess.Popen(
        [sys.executable, "-c", _WATCHED, str(folder), str(logs), str(connection)],
        stdout=subprocess.PIPE,
        text=True,
    ) as watched:
        assert watched.stdout is not None
        watchdog, child = map(Process, map(int, watched.stdout.readline().split()))
        deadline = time.monotonic() + 20
        while not _ignores(watchdog.pid, signal.SIGTERM) or processes_of(folder) != {child}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            watchdog.send_signal(number)
        assert running_after({watchdog, child}, wait_s=0.5) == {watchdog, child}
        watched.kill()
    assert not running_after({watchdog, child}, wait_s=20)
    assert reader.poll() is None
    assert not folder.exists()
    assert not connection.parent.exists()
    assert (logs / "ray" / "worker-1.out").read_text() == "up\n"
    assert not (logs / "ray").is_symlink()


def test_a_session_whose_processes_have_ended_by_themselves_ends_at_once(folder: Path) -> None:
    watchdog = Watchdog(folder, logs=None)
    began_s = time.monotonic()
    watchdog.end()
    assert time.monotonic() - began_s < 4.0
    assert not folder.exists()


def test_the_watched_process_does_the_work_of_a_watchdog_that_was_killed(
    folder: Path, tmp_path: Path
) -> None:
    watchdog = Watchdog(folder, logs=None)
    connection = tmp_path / "service-1.json"
    connection.touch()
    watchdog._process.kill()
    watchdog._process.wait()
    watchdog.remove_at_end(connection)
    watchdog.end()
    assert not folder.exists()
    assert not connection.exists()


_GRANDCHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_grandchild_in_a_session_of_its_own_is_found_and_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _GRANDCHILD], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        family = descendants(child.pid)
        assert len(family) == 1
        assert family < descendants()
        child.kill()
    assert running_after(family, wait_s=0.0) == family  # it outlived its parent
    end(family)
    assert not running_after(family, wait_s=5.0)


def test_a_number_that_was_given_to_another_process_is_not_taken_for_ours() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (real,) = {p for p in descendants() if p.pid == child.pid}
        stranger = Process(child.pid)
        stranger._ident = (child.pid, real.create_time() - 1)
        assert running_after([real, stranger], wait_s=0.0) == {real}
        end([stranger])
        assert child.poll() is None
        child.kill()


def test_a_process_that_has_gone_has_no_descendants() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert descendants(child.pid) == set()
