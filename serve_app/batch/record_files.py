"""Outputs in local files of JSON lines: one of answers, one of errors."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pyarrow import fs

from eesd_dist.errors import ConfigError
from serve_app.batch.disk import writing
from serve_app.batch.ledger import Ledger
from serve_app.batch.manifest import Manifest
from serve_app.batch.records import Record, Recovery, records_of
from serve_app.batch.results import RECORD_START, RowResult

_LINES_PER_SYNC = 32
_SECONDS_PER_SYNC = 2.0


class RecordFile:
    """A file of records, one JSON object per line; more are appended."""

    def __init__(self, path: Path) -> None:
        """Cuts off a torn line at the end. Raises ConfigError if that is none of a record."""
        self._path = path
        with writing(path):
            self._file = _opened(path)
            end, tail = _end_of_last_line(path)
            if not (tail.startswith(RECORD_START) or RECORD_START.startswith(tail)):
                self._file.close()
                raise ConfigError(
                    f"{path}: its last line is no result of a batch; name another output"
                )
            self._file.truncate(end)
        self._num_unsynced = 0
        self._synced_s = time.monotonic()

    def records(self) -> Iterator[Record]:
        with self._path.open("rb") as lines:
            yield from records_of(lines, name=str(self._path))

    def rewrite(self, lines: Iterator[bytes]) -> None:
        draft = self._path.with_name(f"{self._path.name}.rewriting")
        with writing(self._path):
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

    def append(self, line: bytes) -> None:
        """Writes the line to the file; it is on disk a little later."""
        with writing(self._path):
            self._write(line)
            self._num_unsynced += 1
            is_due = time.monotonic() - self._synced_s > _SECONDS_PER_SYNC
            if is_due or self._num_unsynced >= _LINES_PER_SYNC:
                self._sync()

    def put_in_order(self, ledger: Ledger) -> None:
        """Sorts the records in the order of the input; those of other rows come last."""
        ledger.enter_lines(self._positions())
        if _are_in_order(ledger.lines_in_order()):
            return
        with self._path.open("rb") as content:
            self.rewrite(_line_at(content, *line) for line in ledger.lines_in_order())

    def close(self, *, after_error: bool) -> None:
        # An earlier error is passed on: it may be the reason why this disk fails now.
        closing: AbstractContextManager[object] = (
            suppress(OSError) if after_error else writing(self._path)
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

    def _positions(self) -> Iterator[tuple[str, int, int]]:
        position = 0
        for record in self.records():
            yield record.custom_id, position, len(record.line)
            position += len(record.line)


class _UnchangedFile:
    """A file of records that may not be there, and is only read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def records(self) -> Iterator[Record]:
        if self._path.exists():
            with self._path.open("rb") as lines:
                whole = (line for line in lines if line.endswith(b"\n"))
                yield from records_of(whole, name=str(self._path))

    def rewrite(self, lines: Iterator[bytes]) -> None:
        raise AssertionError("a dry run changes no file")


class JsonlOutput:
    """A local file of answers, and one of errors, which is there once a row has failed."""

    def __init__(self, path: Path, *, ordered: bool, dry_run: bool = False) -> None:
        """`ordered`: puts the records into the order of the input, once all rows are done.
        `dry_run`: changes no file."""
        self.name = str(path)
        self._path = path
        self._ordered = ordered
        self._errors = errors_path_of(path)
        self._manifest = Manifest(
            fs.LocalFileSystem(), f"{path}.manifest.json", output=self.name, dry_run=dry_run
        )
        self._files: dict[bool, RecordFile] = {}
        """The open files, by whether their rows have failed."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (str(self._path), str(self._errors), f"{self._path}.manifest.json")

    @property
    def errors_path(self) -> str:
        return str(self._errors)

    def claim(self, contents: Mapping[str, object], recovery: Recovery) -> None:
        has_rows = any(
            path.exists() and path.stat().st_size > 0 for path in (self._path, self._errors)
        )
        self._manifest.claim(contents, has_rows=has_rows, recovery=recovery)

    def recover(self, ledger: Ledger, recovery: Recovery) -> None:
        if recovery.dry_run:
            files = [_UnchangedFile(path) for path in (self._path, self._errors)]
            recovery.recover(files, ledger, name=self.name)
            return
        self._open(has_failed=False)
        if self._errors.exists():
            self._open(has_failed=True)
        recovery.recover(list(self._files.values()), ledger, name=self.name)

    def append(self, result: RowResult) -> None:
        if result.has_failed not in self._files:
            self._open(has_failed=result.has_failed)
        self._files[result.has_failed].append(result.record())

    def finish(self, ledger: Ledger) -> None:
        for file in self._files.values() if self._ordered else ():
            file.put_in_order(ledger)

    def _open(self, *, has_failed: bool) -> None:
        path = self._errors if has_failed else self._path
        self._files[has_failed] = RecordFile(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for file in self._files.values():
                file.close(after_error=error is not None)
        finally:
            self._manifest.close()


def errors_path_of(path: Path) -> Path:
    """Returns the file of errors of an output: `answers.errors.jsonl` of `answers.jsonl`."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.errors.jsonl")


def _end_of_last_line(path: Path) -> tuple[int, bytes]:
    """Returns where the last whole line ends, and what follows."""
    end, tail = 0, b""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                end += len(line)
            else:
                tail = line
    return end, tail


def _are_in_order(lines: Iterator[tuple[int, int]]) -> bool:
    end = 0
    for position, size in lines:
        if position != end:
            return False
        end += size
    return True


def _line_at(content: IO[bytes], position: int, size: int) -> bytes:
    content.seek(position)
    return content.read(size)


def _opened(path: Path) -> FileIO:
    """Opens without a buffer, which would write a failed line again when it is closed."""
    return path.open("ab+", buffering=0)
