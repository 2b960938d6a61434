"""Records of an output: which rows they answer, and which of them give way to a new run."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from eesd_dist.errors import ConfigError
from serve_app.batch.ledger import KnownRow, Ledger, RowState
from serve_app.batch.results import is_transient

_AT_ONCE = 512
_BYTES_AT_ONCE = 2**26


class Record(NamedTuple):
    """Record of an output."""

    line: bytes
    """The record as it is in a file of JSON lines."""
    content: Mapping[str, Any]

    @property
    def custom_id(self) -> str:
        return str(self.content["custom_id"])

    @property
    def has_failed(self) -> bool:
        return self.content.get("error") is not None

    def has_changed(self, row: KnownRow | None) -> bool:
        """Returns whether the input has the row with another content."""
        return row is not None and row.digest != self.content.get("digest", row.digest)


class RecordStore(Protocol):
    """A file of an output."""

    def records(self) -> Iterator[Record]: ...
    def rewrite(self, lines: Iterator[bytes]) -> None:
        """Replaces all records, once the new ones are complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Which rows of an earlier run are not run again."""

    retry_errors: bool = False
    """Runs failed rows again, also those that were refused as invalid."""
    force: bool = False
    """Keeps answers to rows that have another content now."""
    dry_run: bool = False
    """Changes no file."""

    def recover(self, stores: Sequence[RecordStore], ledger: Ledger, *, name: str) -> None:
        """Enters the rows that are done in the ledger, and removes records that give way.

        Raises ConfigError for answered rows that have changed, unless forced; nothing is removed
        then.
        """
        if not self.force:
            self._refuse_changed(stores, ledger, name=name)
        for store in stores:
            entries = _with_rows(store.records(), ledger)
            if not self.dry_run and any(self._gives_way(*entry) for entry in entries):
                store.rewrite(
                    record.line
                    for record, row in _with_rows(store.records(), ledger)
                    if not self._gives_way(record, row)
                )
            ledger.mark(
                (row.ordinal, RowState.FAILED if record.has_failed else RowState.ANSWERED)
                for record, row in _with_rows(store.records(), ledger)
                if row is not None and not self._gives_way(record, row)
            )

    def _refuse_changed(self, stores: Sequence[RecordStore], ledger: Ledger, *, name: str) -> None:
        num_changed, example = 0, ""
        for store in stores:
            for record, row in _with_rows(store.records(), ledger):
                if record.has_changed(row) and not self._gives_way(record, row):
                    num_changed += 1
                    example = example or record.custom_id
        if num_changed:
            raise ConfigError(
                f"{name}: {num_changed} rows were answered already and have another content now, "
                f"e.g. '{example}'; name another output, or use --force to keep the old answers"
            )

    def _gives_way(self, record: Record, row: KnownRow | None) -> bool:
        """Returns whether a row failed that may succeed now, or has been corrected."""
        if not record.has_failed:
            return False
        response = record.content.get("response")
        status = response.get("status_code") if isinstance(response, dict) else None
        return self.retry_errors or is_transient(status) or record.has_changed(row)


def records_of(lines: Iterable[bytes], *, name: str) -> Iterator[Record]:
    """Yields the records of JSON lines. Raises ConfigError for a line that is none."""
    for line_number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict) or "custom_id" not in content:
            raise ConfigError(
                f"{name}: line {line_number} is no result of a batch; name another output"
            )
        yield Record(line, content)


def _with_rows(
    records: Iterator[Record], ledger: Ledger
) -> Iterator[tuple[Record, KnownRow | None]]:
    """Yields records with what the ledger has about their rows; asks it for many at a time."""
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record.line)
        if len(chunk) == _AT_ONCE or size > _BYTES_AT_ONCE:
            yield from _looked_up(chunk, ledger)
            chunk, size = [], 0
    yield from _looked_up(chunk, ledger)


def _looked_up(records: list[Record], ledger: Ledger) -> Iterator[tuple[Record, KnownRow | None]]:
    yield from zip(records, ledger.known([record.custom_id for record in records]), strict=True)
