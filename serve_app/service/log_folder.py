"""Folder for the logs of a service that stay after it has ended: a private one for each start."""

import os
import shutil
import time
from pathlib import Path

from eesd_dist.errors import ConfigError
from eesd_dist.user_folders import user_folder
from serve_app.service.watchdog import RAY_LOGS

_NUM_KEPT = 10


def new_log_folder(parent: Path | None, *, port: int) -> Path:
    """Creates a folder in `parent`, or in the user's state folder, and deletes the oldest ones. A
    user without a home folder that can be written has one among the temporary folders.

    Raises ConfigError if it cannot be created.
    """
    if parent is None:
        parent = user_folder("XDG_STATE_HOME", ".local/state", in_temporary="state") / "logs"
    parent = parent.absolute()
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-port{port}-{os.getpid()}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}: name a folder for the logs with --log-folder"
        ) from error
    for old in sorted(filter(_has_ended, parent.glob("*-port*-*")))[:-_NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _has_ended(folder: Path) -> bool:
    """Returns whether Ray's logs are in the folder, or gone, rather than still being written."""
    logs = folder / RAY_LOGS
    return not (logs.is_symlink() and logs.exists())
