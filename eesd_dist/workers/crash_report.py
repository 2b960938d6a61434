"""Reports of native crashes: a process that dies of its own fault says so in a log file.

An abort, a segmentation fault or a bus error is reported by the process itself, in its signal
handler; SIGKILL, which comes from outside, is not. So a death with a report may be the fault of a
request, and one without is not.
"""

import faulthandler
import os
import tempfile
from pathlib import Path


def report_crashes() -> None:
    """Lets this process leave a report when native code crashes."""
    # Never closed: the signal handler writes to it.
    file = os.open(_file(os.getpid()), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    faulthandler.enable(file=file, all_threads=False)


def crash_report(pid: int) -> str:
    """Returns the first line of what a dead process of this node has reported; empty if it has
    reported nothing."""
    try:
        lines = _file(pid).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[0] if lines else ""


def _file(pid: int) -> Path:
    """Ray's log folder is where it has put this process's standard error."""
    stderr = Path("/proc/self/fd/2")
    log = stderr.resolve() if stderr.exists() else Path()
    folder = log.parent if log.is_file() else Path(tempfile.gettempdir())
    return folder / f"eesd-crash-{pid}.txt"
