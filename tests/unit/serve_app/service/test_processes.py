"""Descendants are found, told apart from refused, and ended."""

import subprocess
import sys

from psutil import Process

from serve_app.service.processes import end, running_after
from tests.support.running import descendants

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
