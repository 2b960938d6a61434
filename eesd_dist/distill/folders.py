"""A folder that a step writes into: one process at a time, and no scraps of a killed one."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from eesd_dist.distill.features import write_whole
from eesd_dist.errors import ConfigError

_LOCK_FILE = ".lock"


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Within the block nobody else works on the folder; a killed process holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_FILE).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process is at work here; wait for it, or name another folder"
            ) from None
        for scrap in folder.glob(".*.partial"):
            scrap.unlink(missing_ok=True)
        yield


def write_json(file: Path, content: Mapping[str, object]) -> Path:
    """Whole or not at all."""
    write_whole(file, (json.dumps(content, indent=2) + "\n").encode())
    return file
