"""Outputs: the places of a batch's results.

However the process ends, an output holds whole records, and at most one torn line at its end, which
the next run cuts off. A row is done as soon as its record is in the output: there is no other list
of what is done.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from eesd_dist.errors import ConfigError
from serve_app.batch.ledger import Ledger
from serve_app.batch.part_folder import PartFolder
from serve_app.batch.record_files import JsonlOutput
from serve_app.batch.records import Recovery
from serve_app.batch.results import RowResult

Format = Literal["jsonl", "parquet"]


class Output(Protocol):
    """The results of one job. Used as a context."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of its files, or of their folder."""
        ...

    @property
    def errors_path(self) -> str:
        """Path of the file of failed rows, or pattern of several."""
        ...

    def claim(self, contents: Mapping[str, object], recovery: Recovery) -> None:
        """Records what the rows are made with. Raises ConfigError if those that are there were made
        with something else, unless forced."""
        ...

    def recover(self, ledger: Ledger, recovery: Recovery) -> None:
        """Enters the rows that are done in the ledger. Raises ConfigError for answered rows that
        have changed since, unless forced."""
        ...

    def append(self, result: RowResult) -> None:
        """Takes a result; it is on disk a little later."""
        ...

    def finish(self, ledger: Ledger) -> None:
        """Completes the output, once all rows are done."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def output_of(word: str, *, format: Format | None, ordered: bool, dry_run: bool = False) -> Output:
    """Returns the output that a word names: a local file of JSON lines, or a folder of parts where
    it is a URI, ends with a slash or `.parquet`, is a folder, or `format` is `parquet`.

    Raises ConfigError for another form, for the order of the input (`ordered`) in a folder, and
    while another job writes it."""
    is_parquet = format == "parquet" or (format is None and word.rstrip("/").endswith(".parquet"))
    if is_parquet or "://" in word or word.endswith("/") or Path(word).is_dir():
        if ordered:
            raise ConfigError(
                f"--ordered: found together with {word}, a folder of parts, which are written as "
                "rows are done: sort by the column `row`, or name a .jsonl file"
            )
        return PartFolder(word, is_parquet=is_parquet, dry_run=dry_run)
    if word.endswith((".csv", ".gz", ".zst")):
        raise ConfigError(
            f"{word}: found an output in a form that is not written here, expected a .jsonl file, "
            "or a folder of JSON lines or Parquet"
        )
    return JsonlOutput(Path(word), ordered=ordered, dry_run=dry_run)
