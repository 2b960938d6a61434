"""Ends a local Ray with the process that started it, however that process ends.

    python -m serve_app.service.watchdog FOLDER [LOGS]

The watchdog is a process of its own. It reads its standard input until the other end is closed,
which also happens when that process is killed. Then it kills what is left of the Ray in FOLDER,
moves Ray's logs to LOGS and removes FOLDER. Each line of its input is a connection file to remove
as well. Nothing here imports Ray.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from psutil import STATUS_ZOMBIE, NoSuchProcess, Process, process_iter
from psutil import Error as PsutilError

from serve_app.service.connection_file import remove

RAY_LOGS = "ray"
"""Within the log folder: a link to Ray's logs while Ray runs, and then these logs."""

_DRIVER_LOG = "python-core-driver-"
_SETTLE_S = 5.0
_KILL_S = 15.0
_POLL_S = 0.1
_LOOK_S = 0.05


def running_after(processes: Iterable[Process], *, wait_s: float) -> set[Process]:
    """Returns those that still run when the time is up. A pid that another process has been given
    since is not counted."""
    deadline = time.monotonic() + wait_s
    left = set(filter(_is_running, processes))
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        left = set(filter(_is_running, left))
    return left


def end(processes: Iterable[Process]) -> None:
    for process in processes:
        with suppress(NoSuchProcess):
            process.kill()


def _is_running(process: Process) -> bool:
    with suppress(NoSuchProcess):
        return bool(process.is_running() and process.status() != STATUS_ZOMBIE)
    return False


class Watchdog:
    """A watchdog process, as the process that it watches has it."""

    def __init__(self, folder: Path, *, logs: Path | None) -> None:
        self._folder = folder
        self._logs = logs
        self._connection_files: list[Path] = []
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                __name__,
                str(folder),
                *([] if logs is None else [str(logs)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a terminal's Ctrl-C is for the watched process
        )

    def remove_at_end(self, connection_file: Path) -> None:
        self._connection_files.append(connection_file)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed: see end()
            self._process.stdin.write(f"{connection_file}\n".encode())

    def end(self) -> None:
        """Ends the session; returns when nothing of it is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:  # it was killed itself
            end_session(self._folder, logs=self._logs, connection_files=self._connection_files)


def processes_of(folder: Path) -> set[Process]:
    """Returns the processes that write Ray's logs: all that Ray has started, and their children,
    which inherit standard output. Drivers have other files: they are the watched process, and
    commands that were connected to it. A HAProxy writes to files of its own, which its successor
    removes; its command line names its configuration.

    Other marks get lost: a killed parent leaves no tree of processes, and Ray's processes overwrite
    their command line, and a part of their environment with it.
    """
    logs, haproxy = logs_of(folder).resolve(), f"{haproxy_folder(folder)}/"
    return {
        process
        for process in process_iter()
        if _writes_in(logs, process) or _is_started_with(haproxy, process)
    }


def _writes_in(logs: Path, process: Process) -> bool:
    try:
        written = [Path(file.path) for file in process.open_files() if file.mode != "r"]
    except PsutilError:  # it is another user's, or has ended
        return False
    return any(path.parent == logs and not path.name.startswith(_DRIVER_LOG) for path in written)


def _is_started_with(folder: str, process: Process) -> bool:
    try:
        return any(word.startswith(folder) for word in process.cmdline())
    except PsutilError:
        return False


def end_session(folder: Path, *, logs: Path | None, connection_files: list[Path]) -> None:
    for file in connection_files:
        remove(file)
    running_after(processes_of(folder), wait_s=_SETTLE_S)
    deadline = time.monotonic() + _KILL_S
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        end(left)
        time.sleep(_POLL_S)
    if logs is not None:
        _keep_logs(folder, logs / RAY_LOGS)
    shutil.rmtree(folder, ignore_errors=True)


def ray_folder(folder: Path) -> Path:
    """Returns Ray's own folder. Ray opens it to all users, so the session's private folder is
    around it."""
    return folder / "r"


def haproxy_folder(folder: Path) -> Path:
    """Returns where Serve's HAProxy has its files."""
    return folder / "h"


def logs_of(folder: Path) -> Path:
    """Returns where Ray writes its logs."""
    return ray_folder(folder) / "session_latest" / "logs"


def _keep_logs(folder: Path, destination: Path) -> None:
    destination.unlink(missing_ok=True)
    if logs_of(folder).is_dir():
        shutil.move(logs_of(folder), destination)


def _main(folder: str, logs: str | None = None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a service manager sends them to all processes
    files = [Path(line.rstrip("\n")) for line in sys.stdin]
    end_session(Path(folder), logs=None if logs is None else Path(logs), connection_files=files)


if __name__ == "__main__":
    _main(*sys.argv[1:])
