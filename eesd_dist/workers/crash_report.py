"""Reports of native crashes: a process that dies of its own fault says so in a log file.

An abort, a segmentation fault or a bus error is reported by the process itself, in its signal
handler; SIGKILL, which comes from outside, is not. So a death with a report may be the fault of a
request, and one without is not. A process without room on its disks dies without a word, so room is
looked for before it is started.
"""

import faulthandler
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from eesd_dist.errors import EngineError

_TAIL_BYTES = 4096
_MAX_CHARS = 300


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


def last_words(pid: int) -> str:
    """Returns what a dead process of this node has said last: its crash report, or the last line of
    its standard error; empty if it has said nothing."""
    if report := crash_report(pid):
        return report
    for file in log_folder().glob(f"worker-*-{pid}.err"):
        with suppress(OSError), file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            lines = opened.read().decode(errors="replace").split("\n")
            messages = [line.strip() for line in lines if line.strip() and not line.startswith(":")]
            return messages[-1][:_MAX_CHARS] if messages else ""
    return ""


def log_folder() -> Path:
    """Returns Ray's log folder: where it has put this process's standard error."""
    stderr = Path("/proc/self/fd/2")
    log = stderr.resolve() if stderr.exists() else Path()
    return log.parent if log.is_file() else Path(tempfile.gettempdir())


def _file(pid: int) -> Path:
    return log_folder() / f"eesd-crash-{pid}.txt"


_MIN_BYTES = 16 * 2**20
"""A process writes logs and kept kernels; without room it dies without a word."""


def require_room(
    folders: Iterable[Path] | None = None,
    *,
    room: Callable[[Path], os.statvfs_result] = os.statvfs,
) -> None:
    """Raises EngineError with the first folder on a full disk. `folders` None: those of Ray's logs
    and of temporary files."""
    if folders is None:
        folders = (log_folder(), Path(tempfile.gettempdir()))
    for folder in folders:
        disk = room(folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < _MIN_BYTES:
            raise EngineError(
                f"no space on the disk of {folder}: found {free_bytes / 2**20:.1f} MiB free, "
                f"expected at least {_MIN_BYTES // 2**20} MiB for a new process: delete something"
            )
        if disk.f_files and not disk.f_favail:
            raise EngineError(
                f"no space on the disk of {folder}: found no free inode, expected some for the "
                "files of a new process: delete some files"
            )
