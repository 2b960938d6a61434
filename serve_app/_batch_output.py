"""The output file of a batch, and the manifest beside it.

Whatever kills the process, the file holds whole lines and at most one torn line at its end, which
the next run cuts off. The manifest says what the lines were made with; another model, seed or
other defaults are refused, since half the file would then have another meaning. One process at a
time: the manifest is locked. Knows nothing of requests.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from eesd_dist.errors import ConfigError
from serve_app.openai.sse import encoded

_LINES_PER_SYNC = 32
_SECONDS_PER_SYNC = 2.0


class Manifest:
    """Locked as long as it is open."""

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
        """Refuses an output that was made with something else, unless forced."""
        self._file.seek(0)
        text = self._file.read()
        has_rows = output.exists() and output.stat().st_size > 0
        if has_rows and not force:
            self._refuse_another(text, contents, output=output)
        wanted = json.dumps(contents, indent=2, sort_keys=True)
        if text == wanted:
            return
        self._file.seek(0)
        self._file.truncate()
        self._file.write(wanted)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _refuse_another(self, text: str, contents: Mapping[str, object], *, output: Path) -> None:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError(
                f"{output}: has rows already, and no manifest says how they were made; name "
                "another output, or take --force to go on behind them"
            )
        names = sorted(found.keys() | contents.keys())
        for name in names:
            if found.get(name) != contents.get(name):
                raise ConfigError(
                    f"{output}: its rows were made with {name} {found.get(name)!r}, this run has "
                    f"{contents.get(name)!r}; name another output, or take --force to mix them"
                )


class OutputFile:
    """Rows that are done; more are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: IO[bytes] = path.open("ab+")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
        self._num_unsynced = 0
        self._synced_s = time.monotonic()

    def recover(self) -> dict[str, str]:
        """Cuts off a torn line and drops rows that may go better now.

        Returns the digest of every row that is done, by id.
        """
        self._cut_torn_line()
        records = list(self._records())
        if any(_is_worth_another_try(record) for _, record in records):
            records = [entry for entry in records if not _is_worth_another_try(entry[1])]
            self._rewrite(line for line, _ in records)
        return {str(record["custom_id"]): str(record.get("digest")) for _, record in records}

    def append(self, record: Mapping[str, object]) -> None:
        """The line is out of this process when this returns, and on disk a little later."""
        try:
            self._file.write(encoded(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be written ({error.strerror}); make room and start again, "
                "what is done stays done"
            ) from error
        self._num_unsynced += 1
        is_late = time.monotonic() - self._synced_s > _SECONDS_PER_SYNC
        if is_late or self._num_unsynced >= _LINES_PER_SYNC:
            self._sync()

    def put_in_order(self, ids: Mapping[str, object]) -> None:
        """Rows in the order of `ids`; those of no id in it come last, as they stand."""
        rank = {custom_id: i for i, custom_id in enumerate(ids)}
        lines = [(rank.get(str(r["custom_id"]), len(rank)), line) for line, r in self._records()]
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
        self._sync()
        self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._num_unsynced = 0
        self._synced_s = time.monotonic()

    def _cut_torn_line(self) -> None:
        content_end = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            content_end += len(line)
        self._file.truncate(content_end)

    def _records(self) -> Iterator[tuple[bytes, dict[str, object]]]:
        self._file.seek(0)
        for line_number, line in enumerate(self._file, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or "custom_id" not in record:
                raise ConfigError(
                    f"{self._path}: line {line_number} is no result of a batch; name another output"
                )
            yield line, record

    def _rewrite(self, lines: Iterator[bytes]) -> None:
        """All or nothing: a new file takes the old one's name when it is complete."""
        draft = self._path.with_name(f"{self._path.name}.rewriting")
        with draft.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        self._file.close()
        self._file = self._path.open("ab+")


def _is_worth_another_try(record: Mapping[str, object]) -> bool:
    """Refused for lack of room, or failed on our side."""
    response = record.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    return isinstance(status, int) and (status == 429 or status >= 500)
