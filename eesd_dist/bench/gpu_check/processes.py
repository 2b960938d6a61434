"""Runs one section as a process with a deadline.

If the process raises, hangs or crashes, its rows so far are kept, and a failed row has the reason.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from eesd_dist.bench.gpu_check.report_rows import Row
from eesd_dist.bench.gpu_check.setting import DeviceName, Section

_CHILD = "eesd_dist.bench.gpu_check.child"
_LAST_LINES = 400


def run_section(
    section: Section,
    *,
    device: DeviceName,
    model: Path,
    seconds: float,
    emit: Callable[[Row], None],
) -> None:
    with tempfile.TemporaryDirectory(prefix=f"gpu-check-{section.name}-") as scratch:
        words = [section.name, section.module, device, str(model), scratch, str(seconds)]
        with tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, *words],
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
            reason = _follow(process, seconds=seconds, emit=emit)
            if reason is not None:
                emit(
                    Row(
                        section=section.name,
                        name="section",
                        ok=False,
                        value=reason,
                        detail=_last_line(stderr),
                    )
                )


def _follow(
    process: "subprocess.Popen[bytes]",
    *,
    seconds: float,
    emit: Callable[[Row], None],
) -> str | None:
    """Emits rows until the process ends; returns what was wrong with its end, if anything."""
    assert process.stdout is not None
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        return _take_rows(process, lines, seconds=seconds, emit=emit)
    finally:
        _end(process)
        reader.join()


def _take_rows(
    process: "subprocess.Popen[bytes]",
    lines: "queue.SimpleQueue[bytes | None]",
    *,
    seconds: float,
    emit: Callable[[Row], None],
) -> str | None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return f"timeout after {seconds:.0f} s"
        if line is None:
            break
        try:
            emit(Row.from_line(line.decode()))
        except (ValueError, TypeError):
            return f"a line that is no row: {line[:80]!r}"
    try:
        status = process.wait(timeout=max(deadline - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        return f"timeout after {seconds:.0f} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else None


def _read(stdout: IO[bytes], lines: "queue.SimpleQueue[bytes | None]") -> None:
    with stdout:
        for line in stdout:
            lines.put(line)
    lines.put(None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills the section's process and all its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(stderr: IO[bytes]) -> str:
    """Returns the last line of the process's output; for a traceback, the error."""
    stderr.seek(0)
    said = stderr.read().decode(errors="replace").strip().splitlines()
    sys.stderr.write("\n".join(said[-20:]) + "\n" if said else "")
    errors = [line for line in said if "Error" in line and not line.startswith(" ")]
    return ((errors or said or ["it said nothing"])[-1])[:_LAST_LINES]
