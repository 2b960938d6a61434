"""The output file of a batch, and its manifest.

However the process ends, the file holds whole lines and at most one torn line at its end, which the
next run cuts off. The manifest records what the lines were made with; a run with another model,
seed or defaults is refused, since it would give the rest of the file another meaning. The manifest
is locked, so one process writes at a time. Disk errors are raised as ConfigError. Knows nothing of
requests.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from eesd_dist.errors import ConfigError
from serve_app.openai.sse import encoded

_LINES_PER_SYNC = 32
_SECONDS_PER_SYNC = 2.0


class Manifest:
    """Record of what an output was made with; locked as long as it is open."""

    def __init__(self, output: Path) -> None:
        self._file_name = output.with_name(f"{output.name}.manifest.json")
        try:
            self._file: IO[str] = self._file_name.open("a+")
        except OSError as error:
            raise ConfigError(f"{self._file_name}: cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"{output}: another batch is writing this file; wait for it or name another output"
            ) from error

    def claim(self, contents: Mapping[str, object], *, output: Path, force: bool) -> None:
        """Records `contents`. Raises ConfigError if the output was made with others, unless
        forced."""
        self._file.seek(0)
        text = self._file.read()
        has_rows = output.exists() and output.stat().st_size > 0
        if has_rows and not force:
            self._refuse_another(text, contents, output=output)
        new_text = json.dumps(contents, indent=2, sort_keys=True)
        if text == new_text:
            return
        with _writing(self._file_name):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(new_text)
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # retries only what `claim` has failed to write
            self._file.close()

    def _refuse_another(self, text: str, contents: Mapping[str, object], *, output: Path) -> None:
        try:
            manifest = json.loads(text)
        except ValueError:
            manifest = None
        if not isinstance(manifest, dict):
            raise ConfigError(
                f"{output}: has rows already, and no manifest says how they were made; name "
                "another output, or use --force to append to them"
            )
        if manifest.get("format") != contents.get("format"):
            raise ConfigError(
                f"{output}: another version of eesd began it (format {manifest.get('format')!r}, "
                f"this one has {contents.get('format')!r}), and what decides its texts was "
                "recorded in another way; name another output, or use --force if the model's "
                "folder and the options are still the same"
            )
        names = sorted(manifest.keys() | contents.keys())
        for name in names:
            if manifest.get(name) != contents.get(name):
                raise ConfigError(
                    f"{output}: its rows were made with {name} {manifest.get(name)!r}, this run "
                    f"has {contents.get(name)!r}; name another output, or use --force to mix them"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Rows that are not run again."""

    ids: frozenset[str]
    failed: frozenset[str]
    """The rows among them that were refused as invalid."""


class OutputFile:
    """The rows that are done; more are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = _opened(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
        self._num_unsynced = 0
        self._synced_s = time.monotonic()

    def recover(self, digests: Mapping[str, str], *, force: bool) -> Done:
        """Cuts off a torn line and drops rows that are to run again.

        Those are rows that may succeed now, and failed rows that have changed: their digest is not
        the one in `digests`, which has every row of the input. Raises ConfigError for answered rows
        that have changed, unless forced.
        """
        self._cut_torn_line()
        records = list(self._records())
        survivors = [entry for entry in records if not _is_worth_another_try(entry[1], digests)]
        if not force:
            self._refuse_changed((record for _, record in survivors), digests)
        if len(survivors) < len(records):
            self._rewrite(line for line, _ in survivors)
        return Done(
            ids=frozenset(_id_of(record) for _, record in survivors),
            failed=frozenset(_id_of(record) for _, record in survivors if _has_failed(record)),
        )

    def append(self, record: Mapping[str, object]) -> None:
        """Writes the line to the file; it is on disk a little later."""
        with _writing(self._path):
            self._write(encoded(record) + b"\n")
            self._num_unsynced += 1
            is_due = time.monotonic() - self._synced_s > _SECONDS_PER_SYNC
            if is_due or self._num_unsynced >= _LINES_PER_SYNC:
                self._sync()

    def put_in_order(self, ids: Mapping[str, object]) -> None:
        """Sorts the rows in the order of `ids`; rows of other ids come last, in their order."""
        rank = {custom_id: i for i, custom_id in enumerate(ids)}
        lines = [(rank.get(_id_of(r), len(rank)), line) for line, r in self._records()]
        if lines != sorted(lines, key=lambda entry: entry[0]):
            lines.sort(key=lambda entry: entry[0])
            self._rewrite(line for _, line in lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An earlier error is passed on: it may be the reason why this disk fails now.
        closing: AbstractContextManager[object] = (
            _writing(self._path) if error is None else suppress(OSError)
        )
        with closing, self._file:
            self._sync()

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(size)  # another row may still come, and must not follow a torn line
            raise

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._num_unsynced = 0
        self._synced_s = time.monotonic()

    def _cut_torn_line(self) -> None:
        content_end = 0
        with self._path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                content_end += len(line)
        with _writing(self._path):
            self._file.truncate(content_end)

    def _refuse_changed(
        self, records: Iterable[Mapping[str, object]], digests: Mapping[str, str]
    ) -> None:
        changed = [_id_of(record) for record in records if _has_changed(record, digests)]
        if changed:
            raise ConfigError(
                f"{self._path}: {len(changed)} rows were answered already and have another content "
                f"now, e.g. '{changed[0]}'; name another output, or use --force to keep the old "
                "answers"
            )

    def _records(self) -> Iterator[tuple[bytes, dict[str, object]]]:
        with self._path.open("rb") as lines:
            for line_number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if not isinstance(record, dict) or "custom_id" not in record:
                    raise ConfigError(
                        f"{self._path}: line {line_number} is no result of a batch; name another "
                        "output"
                    )
                yield line, record

    def _rewrite(self, lines: Iterator[bytes]) -> None:
        """Replaces the file by a new one, once that is complete."""
        draft = self._path.with_name(f"{self._path.name}.rewriting")
        with _writing(self._path):
            try:
                with draft.open("wb") as file:
                    file.writelines(lines)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(self._path)
            finally:
                draft.unlink(missing_ok=True)  # half a file would only take space
            rewritten = _opened(self._path)
        self._file.close()
        self._file = rewritten


def _opened(path: Path) -> FileIO:
    """Opens without a buffer, which would write a failed line again when it is closed."""
    return path.open("ab+", buffering=0)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); make room and start again, finished "
            "rows are kept"
        ) from error


def _id_of(record: Mapping[str, object]) -> str:
    return str(record["custom_id"])


def _has_failed(record: Mapping[str, object]) -> bool:
    return record.get("error") is not None


def _has_changed(record: Mapping[str, object], digests: Mapping[str, str]) -> bool:
    """Returns whether the input has the row with another digest."""
    digest = str(record.get("digest"))
    return digests.get(_id_of(record), digest) != digest


def _is_worth_another_try(record: Mapping[str, object], digests: Mapping[str, str]) -> bool:
    """Returns whether a row was refused for lack of room, failed on our side, or was corrected."""
    response = record.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    if isinstance(status, int) and (status == 429 or status >= 500):
        return True
    return _has_failed(record) and _has_changed(record, digests)
