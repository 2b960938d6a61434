"""Files and folders of a step: written atomically, locked, and bound to one request.

A process may be killed at any moment; a file then has either its old or its new content. Does not
depend on formats.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from eesd_dist.errors import ConfigError
from eesd_dist.model.config_fields import read_json

_LOCK_FILE = ".lock"


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Locks the folder for this process and removes partial files; a killed process holds no lock.

    Raises ConfigError when another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_FILE).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process is at work here; wait for it, or use another folder"
            ) from None
        for scrap in folder.glob(".*.partial"):
            scrap.unlink(missing_ok=True)
        yield


def claim(file: Path, request: Mapping[str, object]) -> None:
    """Stores the request that a folder is for. Raises ConfigError if `file` has another one."""
    if file.exists():
        require_same(file, request)
    else:
        write_json(file, request)


def require_same(
    file: Path, request: Mapping[str, object], *, only: Collection[str] | None = None
) -> None:
    """Raises ConfigError with the first key (of `only`) that has another value in `file`."""
    stored, requested = read_json(file), json.loads(json.dumps(request))
    for name in requested if only is None else only:
        if stored.get(name) != requested[name]:
            raise ConfigError(
                f"{file}: was begun with {name} {stored.get(name)!r}, now asked for "
                f"{requested[name]!r}: use the same to continue it, or use another folder"
            )


def write_json(file: Path, content: Mapping[str, object]) -> Path:
    write_whole(file, (json.dumps(content, indent=2) + "\n").encode())
    return file


def write_whole(file: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces the content of a file in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with os.fdopen(os.open(partial, flags, mode), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        error.filename = error.filename or str(file)  # missing in the error of a full disk
        raise
    partial.replace(file)


def put_in_place(folder: Path, final: Path) -> None:
    """Renames `folder` to `final`, and removes an earlier `final`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.old")
    if aside.exists():
        shutil.rmtree(aside)
    if final.exists():
        final.rename(aside)
    folder.rename(final)
    if aside.exists():
        shutil.rmtree(aside)
