"""What a process holds, read from outside; real processes, started here."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.endurance.processes import (
    OTHER,
    Family,
    role_of,
    shared_memory_bytes,
)
from tests.support.running import until

_CHILD = """
import socket, sys, threading
kept = [socket.socket() for _ in range(7)]
files = [open("/dev/null") for _ in range(5)]
threading.Thread(target=threading.Event().wait, daemon=True).start()
memory = bytearray(50 * 2**20)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:eesd:Ingress", "ingress"),
        ("ray::ServeReplica:eesd:Pipeline.handle_request", "replica"),
        ("ray::DraftActor.take", "drafting actor"),
        ("ray::RankActor", "verify rank"),
        ("ray::Router.advise", "router"),
        ("ray::ProxyActor", "proxy"),
        ("ray::ServeController.listen_for_change", "controller"),
        ("/venv/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "raylet"),
        ("/venv/ray/core/src/ray/gcs/gcs_server --log_dir=/raylet", "gcs"),
        ("/venv/bin/python -u log_monitor.py", OTHER),
        ("ray::IDLE", OTHER),
        ("", OTHER),
    ],
)
def test_a_title_tells_the_role(title: str, role: str) -> None:
    assert role_of(title) == role


def test_a_childs_memory_handles_sockets_and_threads_are_read() -> None:
    family = Family()
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        holdings = {pid.number: held for pid, held in family.holdings().items()}[child.pid]
        assert holdings.role == OTHER
        assert holdings.sockets == 7
        assert holdings.handles == 3 + 7 + 5
        assert holdings.threads == 2
        assert holdings.memory_bytes > 50 * 2**20
        child.communicate()
    until(lambda: child.pid not in {pid.number for pid in family.holdings()})


def test_shared_memory_is_counted_in_bytes(tmp_path: Path) -> None:
    before = shared_memory_bytes()
    file = Path("/dev/shm") / tmp_path.name
    try:
        file.write_bytes(bytes(3 * 2**20))
        assert shared_memory_bytes() >= before + 2 * 2**20
    finally:
        file.unlink()
