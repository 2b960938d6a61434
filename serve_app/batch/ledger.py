"""Which rows of a batch there are, and which of them are done.

It is a table that is filled from the input and the output whenever a job starts: in memory up to
a bound, and beyond in a temporary file of SQLite, which nothing is left of.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from eesd_dist.errors import ConfigError
from serve_app.batch.inputs import Inputs
from serve_app.batch.rows import Row, row_of

_CACHE_KIB = 65_536
_AT_ONCE = 512
_SCHEMA = """
CREATE TABLE rows (
    ordinal INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    occurrence INTEGER NOT NULL,
    state INTEGER NOT NULL
);
CREATE TABLE contents (digest TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE lines (ordinal INTEGER PRIMARY KEY, position INTEGER NOT NULL, size INTEGER NOT NULL);
"""


class RowState(IntEnum):
    PENDING = 0
    ANSWERED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """Entry of a row of the input."""

    ordinal: int
    digest: str
    state: RowState


class Ledger:
    """The rows of one job's input, in its order. Close it in the end."""

    def __init__(self) -> None:
        self._table = sqlite3.connect("", isolation_level=None)  # "": temporary, on disk if large
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._table.execute(f"PRAGMA {setting}").fetchall()
        self._table.executescript(_SCHEMA)
        self.num_rows = 0

    def scan(self, inputs: Inputs) -> None:
        """Enters all rows. Raises ConfigError for an id that two rows have."""
        cursor = self._table.cursor()
        cursor.execute("BEGIN")
        for raw in inputs.raw_rows():
            row = row_of(raw)
            occurrence = 0 if row.custom_id else self._num_equal_before(cursor, row.digest)
            labelled = row.named(occurrence, ordinal=self.num_rows)
            try:
                cursor.execute(
                    "INSERT INTO rows VALUES (?, ?, ?, ?, 0)",
                    (self.num_rows, _key(labelled.custom_id), row.digest, occurrence),
                )
            except sqlite3.IntegrityError:
                raise ConfigError(
                    self._repeated(inputs, labelled.custom_id, raw.location)
                ) from None
            self.num_rows += 1
        cursor.execute("COMMIT")

    def _num_equal_before(self, cursor: sqlite3.Cursor, digest: str) -> int:
        answer = cursor.execute(
            "INSERT INTO contents VALUES (?, 1) ON CONFLICT (digest) DO UPDATE SET "
            "number = number + 1 RETURNING number",
            (digest,),
        ).fetchone()
        return int(answer[0]) - 1

    def _repeated(self, inputs: Inputs, custom_id: str, location: str) -> str:
        first = self.known([custom_id])[0]
        assert first is not None
        earlier = next(islice(inputs.raw_rows(), first.ordinal, None)).location
        return (
            f"custom_id '{custom_id}' is in {earlier} and {location}: ids have to be unique, since "
            "results are found by them"
        )

    def known(self, custom_ids: Sequence[str]) -> list[KnownRow | None]:
        """Returns what is known of the rows with these ids; None for ids the input does not
        have."""
        keys = [_key(custom_id) for custom_id in custom_ids]
        marks = ",".join("?" * len(keys))
        rows = {
            key: KnownRow(ordinal=ordinal, digest=digest, state=RowState(state))
            for key, ordinal, digest, state in self._table.execute(
                f"SELECT key, ordinal, digest, state FROM rows WHERE key IN ({marks})", keys
            )
        }
        return [rows.get(key) for key in keys]

    def mark(self, states: Iterable[tuple[int, RowState]]) -> None:
        """Enters the states of rows by ordinal."""
        self._table.execute("BEGIN")
        self._table.executemany(
            "UPDATE rows SET state = ? WHERE ordinal = ?",
            ((int(state), ordinal) for ordinal, state in states),
        )
        self._table.execute("COMMIT")

    def count(self, state: RowState) -> int:
        query = "SELECT count(*) FROM rows WHERE state = ?"
        return int(self._table.execute(query, (int(state),)).fetchone()[0])

    def pending(self, inputs: Inputs) -> Iterator[Row]:
        """Yields the rows to run, in the input's order, with their ids. Raises ConfigError if the
        input is not what it was when it was scanned."""
        marks = self._table.execute("SELECT digest, occurrence, state FROM rows ORDER BY ordinal")
        raw_rows = inputs.raw_rows()
        for ordinal, (digest, occurrence, state) in enumerate(marks):
            raw = next(raw_rows, None)
            if raw is None:
                raise ConfigError(self._changed("it has fewer rows"))
            if state == RowState.PENDING:
                row = row_of(raw)
                if row.digest != digest:
                    raise ConfigError(self._changed(f"{raw.location} has another content"))
                yield row.named(occurrence, ordinal=ordinal)
        if next(raw_rows, None) is not None:
            raise ConfigError(self._changed("it has more rows"))

    def _changed(self, reason: str) -> str:
        return (
            f"the input had {self.num_rows} rows, and has changed during the run ({reason}): start "
            "again, finished rows are kept"
        )

    def enter_lines(self, lines: Iterable[tuple[str, int, int]]) -> None:
        """Enters id, position and size of the lines of an output, in place of earlier ones. Those
        of rows that the input does not have come last."""
        self._table.execute("DELETE FROM lines")
        num_others = 0
        lines = iter(lines)
        while chunk := list(islice(lines, _AT_ONCE)):
            entries = []
            entries_of = self.known([custom_id for custom_id, _, _ in chunk])
            for row, (_, position, size) in zip(entries_of, chunk, strict=True):
                if row is None:
                    num_others += 1
                ordinal = self.num_rows + num_others if row is None else row.ordinal
                entries.append((ordinal, position, size))
            self._table.execute("BEGIN")
            self._table.executemany("INSERT OR REPLACE INTO lines VALUES (?, ?, ?)", entries)
            self._table.execute("COMMIT")

    def lines_in_order(self) -> Iterator[tuple[int, int]]:
        """Yields position and size of the lines, in the order of the input's rows."""
        yield from self._table.execute("SELECT position, size FROM lines ORDER BY ordinal")

    def close(self) -> None:
        self._table.close()


def _key(custom_id: str) -> bytes:
    content = custom_id.encode(errors="backslashreplace")  # allows half surrogates
    return hashlib.blake2b(content, digest_size=16).digest()
