"""Folders of this user: in the home folder, or in a private one among the machine's temporary
folders where the home folder is missing or cannot be written, as in many containers."""

import os
import stat
import tempfile
from pathlib import Path

from eesd_dist.errors import ConfigError

CACHE_VARIABLE = "EESD_CACHE_DIR"


def cache_folder() -> Path:
    """Returns the folder of what a start-up may reuse; it need not exist or be writable."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder)
    return user_folder("XDG_CACHE_HOME", ".cache", in_temporary="cache")


def user_folder(variable: str, in_home: str, *, in_temporary: str) -> Path:
    """Returns `eesd` in the folder that the variable names, or in that folder of the home folder if
    it can be written, otherwise `in_temporary` in the private temporary folder. It need not exist.

    Raises ConfigError if the private temporary folder is needed and another user's.
    """
    if setting := os.environ.get(variable):
        return Path(setting) / "eesd"
    home = Path(os.path.expanduser("~"))  # without HOME and an entry in the table of users: "~"
    if home.is_absolute() and _can_be_written(home / in_home / "eesd"):
        return home / in_home / "eesd"
    folder = temporary_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    require_private(folder)
    return folder / in_temporary


def temporary_folder() -> Path:
    """Returns this user's folder among the temporary ones; it need not exist, or may be another
    user's: see `require_private`."""
    return Path(tempfile.gettempdir()) / f"eesd-{os.getuid()}"


def require_private(folder: Path) -> None:
    """Raises ConfigError unless the folder is this user's alone; a link to one is not."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or not is_private(status):
        raise ConfigError(
            f"{folder}: expected a folder that only you can read, since it holds secrets and code "
            "that your processes run: remove it, chmod 700, or name others (XDG_RUNTIME_DIR, "
            "XDG_STATE_HOME, XDG_CACHE_HOME)"
        )


def is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def _can_be_written(folder: Path) -> bool:
    """Returns whether the folder, or the closest one above it that exists, can be written."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
