"""Record of what an output was made with.

A run with another model, head, seed or defaults is refused, since it would give the rest of the
output another meaning. On a local file system the manifest is locked while a job runs, so that one
process writes at a time.
"""

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pyarrow import fs

from eesd_dist.errors import ConfigError
from serve_app.batch.disk import writing
from serve_app.batch.records import Recovery

logger = logging.getLogger(__name__)

FORMAT = 5
"""Version of the manifest. Changes whenever what it covers, or the form of an output, changes."""


class Manifest:
    """Record of what an output was made with; locked as long as it is open."""

    def __init__(self, system: Any, path: str, *, output: str, dry_run: bool) -> None:
        """`output`: the output, as the user knows it. Raises ConfigError while another job writes
        it; a dry run only reads."""
        self._system, self._path, self._output = system, path, output
        self._lock: IO[str] | None = None
        if dry_run or not isinstance(system, fs.LocalFileSystem):
            return
        with writing(path):
            self._lock = Path(path).open("a+", errors="replace")  # noqa: SIM115  # while it runs
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(
                f"{output}: another batch is writing it; wait for it or name another output"
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("not locked against a second job: output=%s error=%s", output, error)

    def claim(self, contents: Mapping[str, object], *, has_rows: bool, recovery: Recovery) -> None:
        """Records `contents`, except in a dry run. Raises ConfigError if the output was made with
        others, unless forced."""
        text = self._read()
        if has_rows and not recovery.force:
            self._refuse_another(text, contents)
        new_text = json.dumps(contents, indent=2, sort_keys=True)
        if text != new_text and not recovery.dry_run:
            self._write(new_text)

    def close(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # retries only what `claim` has failed to write
                if not os.fstat(self._lock.fileno()).st_size:  # nothing was run
                    Path(self._path).unlink()
                self._lock.close()

    def _read(self) -> str:
        if self._lock is not None:
            self._lock.seek(0)
            return self._lock.read()
        if self._system.get_file_info(self._path).type == fs.FileType.NotFound:
            return ""
        with self._system.open_input_stream(self._path) as stream:
            content: bytes = stream.read()
        return content.decode(errors="replace")

    def _write(self, text: str) -> None:
        with writing(self._path):
            if self._lock is None:
                with self._system.open_output_stream(self._path) as stream:
                    stream.write(text.encode())
                return
            self._lock.seek(0)
            self._lock.truncate()
            self._lock.write(text)
            self._lock.flush()
            os.fsync(self._lock.fileno())

    def _refuse_another(self, text: str, contents: Mapping[str, object]) -> None:
        try:
            manifest = json.loads(text)
        except ValueError:
            manifest = None
        if not isinstance(manifest, dict):
            raise ConfigError(
                f"{self._output}: has rows already, and no manifest says how they were made; name "
                "another output, or use --force to append to them"
            )
        if manifest.get("format") != contents.get("format"):
            raise ConfigError(
                f"{self._output}: another version of eesd began it (format "
                f"{manifest.get('format')!r}, this one has {contents.get('format')!r}), and what "
                "decides its texts was recorded in another way; name another output, or use "
                "--force if the model's folder and the options are still the same"
            )
        for name in dict(contents) | manifest:
            if manifest.get(name) != contents.get(name):
                raise ConfigError(
                    f"{self._output}: its rows were made with {name} {manifest.get(name)!r}, this "
                    f"run has {contents.get(name)!r}; name another output, or use --force to mix "
                    "them"
                )
