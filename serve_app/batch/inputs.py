"""Files of a batch's input: JSON lines, CSV and Parquet, also compressed, of any file system.

The first bytes of a file say what it is. Files are read in order, from their beginning, a piece at
a time: memory does not grow with them. What a row means is the business of `serve_app.batch.rows`.
"""

import csv
import fnmatch
import io
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from eesd_dist.errors import ConfigError
from serve_app.batch.disk import reason_of, writing
from serve_app.batch.rows import COLUMNS, RawRow

Format = Literal["jsonl", "csv", "parquet"]

_CHUNK_BYTES = 2**20
_MAX_LINE_BYTES = 64 * 2**20
_HEAD_BYTES = 64 * 2**10
_ROWS_AT_ONCE = 64
"""Rows of a Parquet file that are Python objects at a time."""
_MAGIC: Mapping[bytes, str] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REQUIRED = frozenset({"prompt", "messages"})
_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS: Mapping[bytes, str] = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_READABLE_ERRORS = (OSError, pa.ArrowException)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """File with rows."""

    name: str
    """Path or URI."""
    path: str
    system: Any
    """File system of pyarrow."""
    size: int
    format: Format
    compression: str | None
    columns: tuple[str, ...] = ()
    """Columns of a table."""


class Inputs:
    """The rows of all files that an argument of `eesd batch` names, in order."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self.files = files

    @property
    def unused_columns(self) -> tuple[str, ...]:
        """Columns of tables that no row is made of."""
        names = dict.fromkeys(name for file in self.files for name in file.columns)
        return tuple(name for name in names if name not in COLUMNS)

    def raw_rows(self) -> Iterator[RawRow]:
        """Yields the rows of all files. Raises ConfigError for a file that cannot be read to its
        end."""
        for file in self.files:
            try:
                yield from _READERS[file.format](file)
            except _READABLE_ERRORS as error:
                raise ConfigError(_unreadable(file.name, error)) from error


@contextmanager
def inputs_of(word: str, *, excluded: Sequence[str] = ()) -> Iterator[Inputs]:
    """Gives the input that a word names: a file, a folder, a glob, a URI of any file system that
    pyarrow knows, or `-`, which is copied to a temporary file first, since rows are read twice.

    `excluded`: local files and folders that are left out of a folder or a glob, as a job's own
    output. Raises ConfigError where nothing is found, or a file is of another format."""
    if word == "-":
        with NamedTemporaryFile(prefix="eesd-batch-") as copy:
            with writing(copy.name):
                shutil.copyfileobj(sys.stdin.buffer, copy)
                copy.flush()
            yield Inputs([_input_file("standard input", copy.name, fs.LocalFileSystem())])
        return
    try:
        system, paths = _found(word)
    except (*_READABLE_ERRORS, ValueError) as error:
        raise ConfigError(_unreadable(word, error)) from error
    paths = [path for path in paths if not _is_below(path, excluded)]
    if not paths:
        raise ConfigError(f"{word}: is the output itself; name another one")
    yield Inputs([_input_file(_name(word, path), path, system) for path in paths])


def _found(word: str) -> tuple[Any, list[str]]:
    system, path = file_system_of(word)
    info = system.get_file_info(path)
    if info.type == fs.FileType.NotFound and any(character in path for character in "*?["):
        root = path[: min(path.index(c) for c in "*?[" if c in path)].rpartition("/")[0]
        selector = fs.FileSelector(root or ".", recursive=True, allow_not_found=True)
        names = [
            info.path.removeprefix("./") for info in system.get_file_info(selector) if info.is_file
        ]
        paths = sorted(name for name in names if _matches(name, path.removeprefix("./")))
        if not paths:
            raise ConfigError(f"{word}: found no such file, expected at least one")
        return system, paths
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"{word}: found no such file: name a file, a folder or a glob, or `-`")
    if info.type != fs.FileType.Directory:
        if not info.is_file:
            raise ConfigError(
                f"{word}: is no regular file, and it has to be read twice: use `-` for a pipe"
            )
        return system, [path]
    selector = fs.FileSelector(path, recursive=True)
    paths = sorted(
        entry.path
        for entry in system.get_file_info(selector)
        if entry.is_file and not _is_hidden(entry.path.removeprefix(path))
    )
    if not paths:
        raise ConfigError(f"{word}: found an empty folder, expected files with rows")
    return system, paths


def _matches(name: str, pattern: str) -> bool:
    """Returns whether a glob names a file; only `**` stands for several folders."""
    if "**" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    names, patterns = name.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _is_hidden(path: str) -> bool:
    return any(name.startswith((".", "_")) for name in path.split("/") if name)


def _is_below(path: str, roots: Sequence[str]) -> bool:
    resolved = Path(path).resolve()
    return any(root in (resolved, *resolved.parents) for root in map(_resolved, roots))


def _resolved(path: str) -> Path:
    return Path(path).resolve()


def file_system_of(word: str) -> tuple[Any, str]:
    """Returns the pyarrow file system of a path or URI, and the path in it."""
    if "://" not in word:
        return fs.LocalFileSystem(), word
    system, path = fs.FileSystem.from_uri(word)
    return system, path


def _name(word: str, path: str) -> str:
    scheme, separator, _ = word.partition("://")
    return f"{scheme}://{path.lstrip('/')}" if separator and scheme != "file" else path


def _input_file(name: str, path: str, system: Any) -> InputFile:
    """Returns the file with what its first bytes say. Raises ConfigError for another format."""
    try:
        size = system.get_file_info(path).size
        with system.open_input_stream(path, compression=None) as stream:
            head = stream.read(_HEAD_BYTES)
        compression = next((c for magic, c in _MAGIC.items() if head.startswith(magic)), None)
        if compression is not None:
            with system.open_input_stream(path, compression=compression) as stream:
                head = stream.read(_HEAD_BYTES)
        file = InputFile(
            name=name,
            path=path,
            system=system,
            size=size,
            format="jsonl",
            compression=compression,
        )
        return _with_format(file, head)
    except _READABLE_ERRORS as error:
        raise ConfigError(_unreadable(name, error)) from error


def _with_format(file: InputFile, head: bytes) -> InputFile:
    if head.startswith(b"PAR1"):
        if file.compression is not None:
            raise ConfigError(f"{file.name}: a Parquet file is compressed inside: unpack it")
        with file.system.open_input_file(file.path) as content:
            names = tuple(pq.ParquetFile(content).schema_arrow.names)
        if _REQUIRED.isdisjoint(names):
            raise ConfigError(
                f"{file.name}: found columns {', '.join(names)}, expected `prompt` or `messages`"
            )
        return replace(file, format="parquet", columns=names)
    _check_text(file.name, head)
    text = head.removeprefix(_BOM).lstrip()
    if text.startswith(b"{") or not text:
        return file
    if text.startswith(b"["):
        raise ConfigError(
            f"{file.name}: found a JSON array, expected one object per line: "
            f"jq -c '.[]' {file.name} > rows.jsonl"
        )
    first_line = head.removeprefix(_BOM).partition(b"\n")[0].decode(errors="replace")
    header = next(csv.reader([first_line.strip("\r")]), [])
    if _REQUIRED.isdisjoint(header):
        raise ConfigError(
            f"{file.name}: found {text[:40].decode(errors='replace')!r} at its beginning, expected "
            "JSON lines, Parquet, or CSV with a column `prompt` or `messages`, also in gzip or zstd"
        )
    return replace(file, format="csv", columns=tuple(header))


def _check_text(name: str, head: bytes) -> None:
    """Raises ConfigError for text of another encoding, or with other line ends."""
    encoding = next((e for prefix, e in _OTHER_ENCODINGS.items() if head.startswith(prefix)), None)
    if encoding is None and b"\0" in head:
        encoding = "an encoding with zero bytes, or no text"
    if encoding is None:
        try:
            head.removesuffix(b"\n").rpartition(b"\n")[0].decode()
        except UnicodeDecodeError as error:
            encoding = f"byte {head[error.start]:#04x} at {error.start}, which is no UTF-8"
    if encoding is not None:
        raise ConfigError(f"{name}: found {encoding}, expected UTF-8: convert it with iconv")
    if b"\r" in head and b"\n" not in head:
        raise ConfigError(
            f"{name}: found lines that end with a carriage return alone, expected line feeds: "
            f"tr '\\r' '\\n' < {name} > rows.jsonl"
        )


def _lines(file: InputFile) -> Iterator[tuple[int, bytes]]:
    """Yields number and content of the lines that are not empty."""
    number, tail, is_first = 0, b"", True
    with file.system.open_input_stream(file.path, compression=file.compression) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            if is_first:
                chunk, is_first = chunk.removeprefix(_BOM), False
            *lines, tail = (tail + chunk).split(b"\n")
            for line in lines:
                number += 1
                if line.strip():
                    yield number, line
            if len(tail) > _MAX_LINE_BYTES:
                raise ConfigError(
                    f"{file.name}: line {number + 1} has more than {_MAX_LINE_BYTES >> 20} MiB, "
                    "expected one object per line"
                )
    if tail.strip():
        yield number + 1, tail


def _jsonl_rows(file: InputFile) -> Iterator[RawRow]:
    for number, line in _lines(file):
        yield RawRow(location=f"{file.name}:{number}", content=line)


def _csv_rows(file: InputFile) -> Iterator[RawRow]:
    with (
        file.system.open_input_stream(file.path, compression=file.compression) as stream,
        io.TextIOWrapper(
            io.BufferedReader(cast("Any", stream), _CHUNK_BYTES), encoding="utf-8-sig", newline=""
        ) as text,
    ):
        csv.field_size_limit(_MAX_LINE_BYTES)
        table = csv.DictReader(text, strict=True)
        try:
            for row in table:
                content = {name: value or None for name, value in row.items() if name is not None}
                if None in row:
                    raise ConfigError(
                        f"{file.name}:{table.line_num}: found more fields than the header has "
                        f"({len(table.fieldnames or ())})"
                    )
                yield RawRow(location=f"{file.name}:{table.line_num}", content=content)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{file.name}:{table.line_num}: {error}") from error


def _parquet_rows(file: InputFile) -> Iterator[RawRow]:
    names = [name for name in file.columns if name in COLUMNS]
    with file.system.open_input_file(file.path) as content:
        table = pq.ParquetFile(content, pre_buffer=False)
        number = 0
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(
                batch_size=_ROWS_AT_ONCE, row_groups=[group], columns=names, use_threads=False
            ):
                for row in batch.to_pylist(maps_as_pydicts="lossy"):
                    number += 1
                    yield RawRow(location=f"{file.name}, row {number}", content=row)


_READERS = {"jsonl": _jsonl_rows, "csv": _csv_rows, "parquet": _parquet_rows}


def _unreadable(name: str, error: Exception) -> str:
    return f"{name}: cannot be read ({reason_of(error)})"
