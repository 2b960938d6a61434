"""A signal stops a job whatever its event loop is at. Each case is a process of its own."""

import signal
import subprocess
import sys
import time

import pytest

_PROGRAM = """
import asyncio, time
from serve_app.batch.signals import cancel_at_signals

async def run():
    cancel_at_signals()
    print("ready", flush=True)
    try:
        {work}
    finally:
        print("cleaned up", flush=True)

try:
    asyncio.run(run())
except (KeyboardInterrupt, asyncio.CancelledError) as end:
    print(type(end).__name__, flush=True)
"""
_WORKS = {
    "waits": ("await asyncio.sleep(60)", "CancelledError", 1.5),
    "scans": ("for _ in range(6000): time.sleep(0.01)", "KeyboardInterrupt", 6.0),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("work", _WORKS)
def test_a_signal_ends_the_task_or_what_it_computes(work: str, number: signal.Signals) -> None:
    code, end, limit_s = _WORKS[work]
    command = [sys.executable, "-c", _PROGRAM.format(work=code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        start_s = time.monotonic()
        process.send_signal(number)
        assert process.stdout.read().split("\n")[:2] == ["cleaned up", end]
        assert time.monotonic() - start_s < limit_s
