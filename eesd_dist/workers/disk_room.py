"""Room on the disks that a new process needs."""

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from eesd_dist.errors import EngineError
from eesd_dist.workers.crash_report import log_folder

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
