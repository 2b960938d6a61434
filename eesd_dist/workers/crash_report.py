"""Reports of native crashes: a process that dies of its own fault says so in a file.

An abort, a segmentation fault or a bus error is reported by the process itself, in its signal
handler; SIGKILL, which comes from outside, is not. So a death with a report may be the fault of a
request, and one without is not.
"""

import faulthandler
import os
import tempfile
from pathlib import Path


def report_crashes() -> None:
    """Lets this process leave a report when native code crashes; called once, before others."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    _remove_old(folder)
    # Never closed: the signal handler writes to it.
    file = os.open(folder / f"{os.getpid()}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    faulthandler.enable(file=file, all_threads=False)


def crash_report(pid: int) -> str:
    """Returns the first line of what a dead process of this node has reported, and removes it;
    empty if it has reported nothing."""
    file = _folder() / f"{pid}.txt"
    try:
        lines = file.read_text(errors="replace").splitlines()
        file.unlink()
    except OSError:
        return ""
    return lines[0] if lines else ""


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"eesd-crashes-{os.getuid()}"


def _remove_old(folder: Path) -> None:
    """Removes files of processes that ended without a report."""
    for file in folder.glob("*.txt"):
        if not Path(f"/proc/{file.stem}").exists() and file.stat().st_size == 0:
            file.unlink(missing_ok=True)
