"""`eesd serve` in a process of its own, as a person starts it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.ordinary_user import as_ordinary_user, ordinary_environment
from tests.support.running import free_port

_READY_S = 300.0
_STOP_S = 120.0


@contextmanager
def command(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    is_ordinary: bool = False,
) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Yields the process of `eesd WORDS`, and its lines as they come. `is_ordinary`: of a user
    without privileges and without a home folder."""
    line = [str(Path(sys.executable).with_name("eesd")), *words]
    process = subprocess.Popen(
        as_ordinary_user(line) if is_ordinary else line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**(ordinary_environment() if is_ordinary else os.environ), **(env or {})},
        cwd=cwd,
    )
    lines: list[str] = []

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(10)
        if process.stdout is not None:
            process.stdout.close()


def wait_for_line(
    lines: list[str], word: str, process: "subprocess.Popen[str]", *, timeout_s: float = 200.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while not any(word in line for line in lines):
        assert process.poll() is None, f"ended with {process.returncode}: {''.join(lines)}"
        assert time.monotonic() < deadline, f"no '{word}' in: {''.join(lines)}"
        time.sleep(0.1)


@contextmanager
def served(*words: str, api_key: str) -> Iterator[int]:
    """Yields the port of a service with the bundled model; stops it with SIGINT."""
    port = free_port()
    env = {"EESD_API_KEY": api_key}
    with command("serve", "--port", str(port), "--name", "demo", *words, env=env) as started:
        process, lines = started
        wait_for_line(lines, "Ctrl-C stops", process, timeout_s=_READY_S)
        try:
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait(_STOP_S)
        assert status == 0, "".join(lines)
