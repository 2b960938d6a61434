"""One thread of another process is stopped, with Python's interpreter lock or without it."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serve_app.bench.chaos.threads import ThreadStopper, why_untraceable

pytestmark = pytest.mark.skipif(bool(why_untraceable()), reason=why_untraceable())

_PROCESS = """
import sys, threading, time
from eesd_dist.workers.epochs.loop import _name_thread
count = 0
def loop():
    global count
    _name_thread("eesd-loop")
    while True:
        sum(range(20_000))
        time.sleep(0.002)
        count += 1
threading.Thread(target=loop, daemon=True).start()
for _ in sys.stdin:
    sys.stdout.write(f"{count}\\n")
    sys.stdout.flush()
"""


class _Process:
    """A process with a loop that computes and waits, and a thread that answers with its count."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._asks, self._answers = process.stdin.fileno(), process.stdout.fileno()

    def count(self, *, within_s: float = 10.0) -> int | None:
        """None without an answer; a later call reads its answer."""
        os.write(self._asks, b"?\n")
        if not select.select([self._answers], [], [], within_s)[0]:
            return None
        return int(os.read(self._answers, 100).split()[-1])

    def goes_on(self) -> bool:
        before = self.count()
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            if self.count() != before:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def _running() -> Iterator[_Process]:
    with subprocess.Popen(
        [sys.executable, "-c", _PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as popen:
        try:
            process = _Process(popen)
            assert process.goes_on()
            yield process
        finally:
            popen.kill()


def test_a_thread_that_waits_is_stopped_and_its_process_still_answers() -> None:
    with _running() as process:
        stopper = ThreadStopper()
        assert stopper.stop(process.pid, "eesd-loop", interpreting=False)
        before = process.count()
        time.sleep(0.3)
        assert process.count() == before
        stopper.release()
        assert process.goes_on()


def test_a_thread_that_holds_the_interpreter_lock_silences_its_process() -> None:
    with _running() as process:
        stopper = ThreadStopper()
        # The interpreter's code also waits for the lock, a few instructions long.
        for _ in range(5):
            assert stopper.stop(process.pid, "eesd-loop", interpreting=True)
            if (count := process.count(within_s=1.0)) is None:
                break
            stopper.go_on()
        assert count is None, "the process has answered each time"
        stopper.release()
        assert process.goes_on()


def test_a_thread_of_another_name_or_in_another_state_is_not_stopped() -> None:
    with _running() as process:
        stopper = ThreadStopper()
        assert not stopper.stop(process.pid, "another", interpreting=False)
        code = "import time\nfrom eesd_dist.workers.epochs.loop import _name_thread\n"
        code += "_name_thread('waits')\nprint(flush=True)\ntime.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as waits:
            assert waits.stdout is not None
            waits.stdout.readline()
            time.sleep(0.2)
            assert not stopper.stop(waits.pid, "waits", interpreting=True, within_s=0.3)
            waits.kill()
        assert process.goes_on()


def test_a_killed_process_with_a_stopped_thread_ends_once_its_stopper_lets_it() -> None:
    with _running() as process:
        stopper = ThreadStopper()
        assert stopper.stop(process.pid, "eesd-loop", interpreting=False)
        stopper.let_die()
        os.kill(process.pid, 9)
        began_s = time.monotonic()
        assert os.waitpid(process.pid, 0)[0] == process.pid
        assert time.monotonic() - began_s < 5.0


def test_a_thread_of_a_process_that_has_gone_cannot_be_stopped() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not ThreadStopper().stop(process.pid, "eesd-loop", interpreting=False)
