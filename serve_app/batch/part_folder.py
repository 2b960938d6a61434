"""Outputs in folders of parts, on any file system: Parquet or JSON lines, and parts of errors.

A part is written when it has many rows or the first of them waits long; rows of a part that was not
written are run again.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from eesd_dist.errors import ConfigError
from serve_app.batch.disk import writing
from serve_app.batch.inputs import file_system_of
from serve_app.batch.ledger import Ledger
from serve_app.batch.manifest import Manifest
from serve_app.batch.records import Record, Recovery, records_of
from serve_app.batch.results import RowResult

_ROWS_PER_PART = 4096
_BYTES_PER_PART = 2**26
_SECONDS_PER_PART = 30.0
_ATOMIC_STORES = frozenset({"s3", "gcs", "abfs"})
"""File systems on which a file appears when it is complete."""
_SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("row", pa.int64()),
        ("generated_text", pa.string()),
        ("num_input_tokens", pa.int64()),
        ("num_generated_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("metrics", pa.string()),
        ("response", pa.string()),
        ("digest", pa.string()),
    ]
)


class PartFolder:
    """A folder of parts. Rows are in order of completion; the column `row` is their number."""

    def __init__(self, word: str, *, is_parquet: bool, dry_run: bool = False) -> None:
        """`dry_run`: changes no file."""
        self.name = word
        try:
            self._system, path = file_system_of(word)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise ConfigError(f"{word}: found {error}, expected a path or a URI") from error
        self._path = path.rstrip("/")
        self._is_parquet = is_parquet
        if not dry_run:
            with writing(word):
                self._system.create_dir(self._path, recursive=True)
        self._manifest = Manifest(
            self._system, f"{self._path}/_manifest.json", output=word, dry_run=dry_run
        )
        self._next_part = 0
        self._run = secrets.token_hex(4)
        """Part of all names: another job in the folder overwrites nothing."""
        self._waiting: list[RowResult] = []
        self._num_bytes = 0
        self._oldest_s = time.monotonic()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self._path,)

    @property
    def errors_path(self) -> str:
        return f"{self.name.rstrip('/')}/errors-*.jsonl"

    def claim(self, contents: Mapping[str, object], recovery: Recovery) -> None:
        self._manifest.claim(contents, has_rows=bool(self._parts()), recovery=recovery)

    def recover(self, ledger: Ledger, recovery: Recovery) -> None:
        paths = self._parts()
        self._next_part = max(map(_number_of, paths), default=-1) + 1
        recovery.recover([_Part(self, path) for path in paths], ledger, name=self.name)

    def append(self, result: RowResult) -> None:
        if not self._waiting:
            self._oldest_s = time.monotonic()
        self._waiting.append(result)
        self._num_bytes += len(result.body)
        is_due = time.monotonic() - self._oldest_s > _SECONDS_PER_PART
        is_large = len(self._waiting) >= _ROWS_PER_PART or self._num_bytes > _BYTES_PER_PART
        if is_due or is_large:
            self._flush()

    def finish(self, ledger: Ledger) -> None:
        del ledger  # parts are in no order
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with suppress(ConfigError):  # after an error, which is passed on
                self._flush()
        finally:
            self._manifest.close()

    def _flush(self) -> None:
        answers = [result for result in self._waiting if not result.has_failed]
        errors = [result for result in self._waiting if result.has_failed]
        if answers:
            suffix = "parquet" if self._is_parquet else "jsonl"
            content = _parquet(answers) if self._is_parquet else _json_lines(answers)
            self.write(self._path_of("part", suffix), content)
        if errors:
            self.write(self._path_of("errors", "jsonl"), _json_lines(errors))
        self._next_part += bool(self._waiting)
        self._waiting, self._num_bytes = [], 0

    def _path_of(self, kind: str, suffix: str) -> str:
        return f"{self._path}/{kind}-{self._next_part:06d}-{self._run}.{suffix}"

    def write(self, path: str, content: bytes) -> None:
        """Writes a file that appears when it is complete."""
        folder, _, name = path.rpartition("/")
        is_atomic = self._system.type_name in _ATOMIC_STORES
        draft = path if is_atomic else f"{folder}/.{name}.writing"
        with writing(path):
            with self._system.open_output_stream(draft) as stream:
                stream.write(content)
            if isinstance(self._system, fs.LocalFileSystem):
                _sync_file(draft)
            if not is_atomic:
                self._system.move(draft, path)

    def records_of(self, path: str) -> Iterator[Record]:
        """Yields the records of a part; those of a Parquet file have no line."""
        if path.endswith(".parquet"):
            try:
                with self._system.open_input_file(path) as content:
                    rows = pq.read_table(content, columns=["custom_id", "digest"]).to_pylist()
                is_ours = all("custom_id" in row for row in rows)
            except (OSError, pa.ArrowException):
                is_ours = False
            if not is_ours:
                raise ConfigError(f"{path}: is no part of a batch; name another output")
            yield from (Record(b"", row) for row in rows)
            return
        with self._system.open_input_stream(path) as stream:
            lines = cast("bytes", stream.read()).splitlines(keepends=True)
        yield from records_of(lines, name=path)

    def _parts(self) -> list[str]:
        return [
            info.path
            for info in self._system.get_file_info(
                fs.FileSelector(self._path, allow_not_found=True)
            )
            if info.is_file and info.base_name.startswith(("part-", "errors-"))
        ]


class _Part:
    """File of a folder, with rows."""

    def __init__(self, folder: PartFolder, path: str) -> None:
        self._folder = folder
        self._path = path

    def records(self) -> Iterator[Record]:
        return self._folder.records_of(self._path)

    def rewrite(self, lines: Iterator[bytes]) -> None:
        self._folder.write(self._path, b"".join(lines))


def _json_lines(results: Sequence[RowResult]) -> bytes:
    return b"".join(result.record() for result in results)


def _parquet(results: Sequence[RowResult]) -> bytes:
    table = pa.Table.from_pylist([result.columns() for result in results], schema=_SCHEMA)
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    content: Any = buffer.getvalue()
    return cast("bytes", content.to_pybytes())


def _number_of(path: str) -> int:
    digits = path.rpartition("/")[2].partition("-")[2].partition("-")[0]
    return int(digits) if digits.isdigit() else -1


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
