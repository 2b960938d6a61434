"""A batch job: scans the input, leaves out what an earlier run has done, and runs the rest.

Every id is answered exactly once, however often the job is stopped. A bad row gets an error record
and stops no other. A row gives the same text in any run, since its seed comes from the job's seed
and its id. Requests are those of the HTTP API, field for field.
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from eesd_dist.errors import ConfigError, EngineError
from serve_app.batch.inputs import inputs_of
from serve_app.batch.ledger import Ledger, RowState
from serve_app.batch.loop import Bodies, TakeResult
from serve_app.batch.manifest import FORMAT
from serve_app.batch.order import mixed_then_longest
from serve_app.batch.outputs import Format, Output, output_of
from serve_app.batch.preview import Preview, preview_of
from serve_app.batch.progress import JobProgress, Throughput
from serve_app.batch.records import Recovery
from serve_app.batch.results import RowResult
from serve_app.batch.rows import Row
from serve_app.batch.usage import Usage

_MAX_FAILURES_IN_A_ROW = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that answers, and what its texts depend on."""

    name: str
    identity: Mapping[str, object]
    """Changes whenever texts may change: digests of weights and head, parameters, numerics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of a job."""

    seed: int = 0
    """The job's seed; the `seed` of a row overrides it."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Body fields of rows that do not set them."""
    override_model: bool = False
    """Answers rows whatever model they name."""
    format: Format | None = None
    """Format of the output; None: as its name says."""
    ordered: bool = False
    """Writes the output in the input's order, in the end; until then in order of completion."""
    recovery: Recovery = field(default_factory=Recovery)
    """Which rows of an earlier run are not run again."""
    max_errors: int | None = None
    """Failed rows after which the job ends; None: any number."""
    show_progress: bool = True
    """Shows progress on standard error."""

    def bodies(self, model: ServedModel) -> Bodies:
        overrides = {"model": model.name} if self.override_model else {}
        return Bodies(seed=self.seed, defaults=self.defaults, overrides=overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Numbers of rows of a job."""

    num_rows: int
    num_skipped: int
    """Done by an earlier run."""
    num_failed_before: int
    """Skipped rows that had failed."""
    num_completed: int
    num_failed: int
    errors_path: str
    """Path of the file of failed rows, or pattern of several."""
    throughput: Throughput
    usage: Usage
    preview: Preview | None = None
    """Rows of a dry run; None for a run."""


class TooManyErrors(EngineError):
    """More rows have failed than the job may have failed rows."""


class Execution(Protocol):
    """Runs rows in some order, and passes on each one's result."""

    @property
    def max_in_flight(self) -> int:
        """Rows that are run at the same time."""
        ...

    async def run(self, rows: Iterator[Row], take: TakeResult) -> None: ...
    @property
    def usage(self) -> Usage:
        """Use of devices so far."""
        ...


Start = Callable[[BatchOptions, int], AbstractAsyncContextManager[Execution]]
"""Starts an execution for so many rows."""


async def run_batch(
    input_word: str,
    output_word: str,
    *,
    execution: Start,
    model: ServedModel,
    options: BatchOptions | None = None,
) -> BatchReport:
    """Runs the rows that are not done. Raises ConfigError before any work if the files do not fit,
    TooManyErrors when too many rows have failed.

    `execution` is entered when there are rows to run."""
    options = options or BatchOptions()
    progress = JobProgress()
    with ExitStack() as stack:
        output = output_of(
            output_word,
            format=options.format,
            ordered=options.ordered,
            dry_run=options.recovery.dry_run,
        )
        stack.enter_context(output)
        inputs = stack.enter_context(inputs_of(input_word, excluded=output.paths))
        stack.enter_context(_room_for_ledger())
        ledger = stack.enter_context(closing(Ledger()))
        ledger.scan(inputs)
        output.claim(_manifest_of(model, options), options.recovery)
        output.recover(ledger, options.recovery)
        num_failed_before = ledger.count(RowState.FAILED)
        num_skipped = ledger.count(RowState.ANSWERED) + num_failed_before
        results = _Results(output, progress, max_errors=options.max_errors)
        usage, preview, throughput = Usage(), None, Throughput()
        if options.recovery.dry_run:
            preview = preview_of(ledger.pending(inputs), options.bodies(model), inputs)
        elif num_skipped < ledger.num_rows:
            async with execution(options, ledger.num_rows - num_skipped) as running:
                total, initial = ledger.num_rows, num_skipped
                with progress.shown(total, initial) if options.show_progress else nullcontext():
                    rows = mixed_then_longest(
                        ledger.pending(inputs), max_in_flight=running.max_in_flight
                    )
                    await running.run(rows, results.take)
                    throughput = progress.throughput
                usage = running.usage
        num_done = num_skipped + results.num_completed + results.num_failed
        if num_done != ledger.num_rows and preview is None:
            raise EngineError(
                f"{ledger.num_rows - num_done} of {ledger.num_rows} rows have no result, and the "
                "job has ended: start it again"
            )
        if preview is None:
            output.finish(ledger)
    return BatchReport(
        num_rows=ledger.num_rows,
        num_skipped=num_skipped,
        num_failed_before=num_failed_before,
        num_completed=results.num_completed,
        num_failed=results.num_failed,
        errors_path=output.errors_path,
        throughput=throughput,
        usage=usage,
        preview=preview,
    )


class _Results:
    """Takes the results of a run."""

    def __init__(self, output: Output, progress: JobProgress, *, max_errors: int | None) -> None:
        self._output = output
        self._progress = progress
        self._max_errors = max_errors
        self._num_failures_in_a_row = 0
        """Failures of the engine in a row, over all rows."""
        self.num_completed = 0
        self.num_failed = 0

    def take(self, result: RowResult) -> None:
        self._output.append(result)
        self.num_failed += result.has_failed
        self.num_completed += not result.has_failed
        self._progress.take(result)
        self._check(result)

    def _check(self, result: RowResult) -> None:
        self._num_failures_in_a_row += 1
        if not result.is_engine_failure:
            self._num_failures_in_a_row = 0
        if self._num_failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            raise EngineError(
                f"{self._num_failures_in_a_row} rows in a row failed on the engine's side, the "
                f"last with: {result.error}; start the job again when the engine works: failed "
                "rows are retried"
            )
        if self._max_errors is not None and self.num_failed > self._max_errors:
            raise TooManyErrors(
                f"{self.num_failed} rows have failed, more than --max-errors {self._max_errors}, "
                f"the last with: {result.error}; the others can be run by starting again"
            )


@contextmanager
def _room_for_ledger() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:  # a full disk
        raise ConfigError(
            f"no room for the list of rows ({error}): name another folder in SQLITE_TMPDIR"
        ) from error


def _manifest_of(model: ServedModel, options: BatchOptions) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "model": model.name,
        **model.identity,
        "seed": options.seed,
        "defaults": dict(options.defaults),
    }
