"""Runs a file of requests with an engine, and continues where an earlier run was killed.

Rows run concurrently, so that a long answer delays no other row. Every id is answered exactly once.
A bad row gets an error record, and is run again once it has been corrected. A row gives the same
text in any run, since its seed comes from the job's seed and its id. Requests are those of the HTTP
API, field for field.
"""

import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from eesd_dist.errors import (
    CapacityError,
    ConfigError,
    EesdError,
    EngineError,
    PoisonRequest,
    RequestError,
)
from serve_app.batch.reader import Row, checked_digests, rows_of
from serve_app.batch.writer import Manifest, OutputFile
from serve_app.openai.answers import Json
from serve_app.openai.errors import HttpError, http_error_of
from serve_app.openai.workloads import Kind

logger = logging.getLogger(__name__)

AnswerRow = Callable[[Kind, Mapping[str, object]], Awaitable[Json]]
"""Answers the body of a row as the HTTP API does: in this process, or by asking a service."""

_FORMAT = 3
"""Version of the manifest. Changes whenever `ServedModel.identity` covers more."""
_MAX_ATTEMPTS = 4
_MAX_FAILURES_IN_A_ROW = 20
_FIRST_PAUSE_S = 0.5
_MAX_CAPACITY_WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that answers, and what its texts depend on."""

    name: str
    identity: str
    """Changes whenever the texts may change: a digest of the weights or of their folder's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    concurrency: int = 16
    """Rows that run at the same time."""
    seed: int = 0
    """The job's seed; the `seed` of a row overrides it."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Body fields of rows that do not set them."""
    ordered: bool = False
    """Writes the output in the input's order, in the end; until then in order of completion."""
    force: bool = False
    """Appends to rows of another model, seed, defaults or input; they stay as they are."""
    show_progress: bool = True
    """Shows a bar on standard error."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(
                f"concurrency is {self.concurrency}, expected 1 or more: nothing would be run"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    num_rows: int
    num_skipped: int
    """Done by an earlier run."""
    num_failed_before: int
    """Skipped rows that were refused as invalid."""
    num_completed: int
    num_failed: int
    num_tokens: int


async def run_batch(
    input_file: Path,
    output_file: Path,
    *,
    answer: AnswerRow,
    model: ServedModel,
    options: BatchOptions | None = None,
) -> BatchReport:
    """Runs the rows that are not done. Raises ConfigError before any work if the files do not
    fit."""
    options = options or BatchOptions()
    digests = _digests(input_file, output_file)
    with closing(Manifest(output_file)) as manifest:
        manifest.claim(_manifest_of(model, options), output=output_file, force=options.force)
        with OutputFile(output_file) as output:
            done = output.recover(digests, force=options.force)
            todo = (row for row in rows_of(input_file) if row.custom_id not in done.ids)
            num_skipped = len(digests.keys() & done.ids)
            with _bar(total=len(digests), initial=num_skipped, options=options) as bar:
                run = _Run(answer, output=output, options=options, bar=bar)
                await run.answer_all(todo)
            if options.ordered:
                output.put_in_order(digests)
    report = BatchReport(
        num_rows=len(digests),
        num_skipped=num_skipped,
        num_failed_before=len(digests.keys() & done.failed),
        num_completed=run.num_completed,
        num_failed=run.num_failed,
        num_tokens=run.num_tokens,
    )
    _check_that_all_are_done(report, input_file)
    return report


def _digests(input_file: Path, output_file: Path) -> dict[str, str]:
    if input_file.resolve() == output_file.resolve():
        raise ConfigError(f"{output_file}: is the input itself; name another output")
    if os.path.exists(input_file) and not os.path.isfile(input_file):
        raise ConfigError(
            f"{input_file}: is no regular file, and it has to be read twice; write the rows to a "
            "file and name that"
        )
    return checked_digests(input_file)


def _check_that_all_are_done(report: BatchReport, input_file: Path) -> None:
    num_done = report.num_skipped + report.num_completed + report.num_failed
    if num_done != report.num_rows:
        raise ConfigError(
            f"{input_file}: had {report.num_rows} rows, and {num_done} were found when they were "
            "run: the file has changed during the run; start again, finished rows are kept"
        )


class _Run:
    """A pass over the rows that are not done yet."""

    def __init__(
        self, answer: AnswerRow, *, output: OutputFile, options: BatchOptions, bar: Any
    ) -> None:
        self._answer = answer
        self._output = output
        self._options = options
        self._bar = bar
        self._num_failures_in_a_row = 0
        """Failures of the engine in a row, over all rows."""
        self.num_completed = 0
        self.num_failed = 0
        self.num_tokens = 0

    async def answer_all(self, rows: Iterator[Row]) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._options.concurrency):
                    workers.create_task(self._answer_some(rows))
        except* EesdError as group:
            raise group.exceptions[0] from None

    async def _answer_some(self, rows: Iterator[Row]) -> None:
        """Takes the next row as soon as the last one is done."""
        for row in rows:
            try:
                body = await self._answered(row)
            except Exception as error:  # one bad row is one error record and nothing more
                self._take_failure(row, error)
            else:
                self._take_answer(row, body)
            self._bar.update()

    async def _answered(self, row: Row) -> Json:
        """Returns the whole response; retries what may succeed later."""
        body = _body_of(row, self._options)
        num_attempts = 0
        waited_s = 0.0
        while True:
            try:
                return await self._answer(row.kind, body)
            except CapacityError as error:
                pause_s = error.retry_after_s
                waited_s += pause_s
                if waited_s > _MAX_CAPACITY_WAIT_S:
                    raise
            except PoisonRequest:
                raise
            except EngineError as error:
                num_attempts += 1
                if num_attempts == _MAX_ATTEMPTS:
                    raise
                pause_s = _FIRST_PAUSE_S * 2 ** (num_attempts - 1)
                logger.warning("row will be tried again: id=%s error=%s", row.custom_id, error)
            await asyncio.sleep(pause_s)

    def _take_answer(self, row: Row, body: Json) -> None:
        self._num_failures_in_a_row = 0
        self._output.append(_record(row, status=HTTPStatus.OK, body=body))
        self.num_completed += 1
        usage = cast("Mapping[str, int]", body["usage"])
        self.num_tokens += usage["completion_tokens"]
        self._bar.set_postfix(tokens=self.num_tokens, failed=self.num_failed, refresh=False)

    def _take_failure(self, row: Row, error: Exception) -> None:
        http_error = http_error_of(error)
        self._output.append(
            _record(row, status=http_error.status, body=http_error.body, error=http_error)
        )
        self.num_failed += 1
        if not isinstance(error, EngineError) or isinstance(error, PoisonRequest):
            return
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            raise EngineError(
                f"{self._num_failures_in_a_row} rows in a row failed on the engine's side, the "
                f"last with: {error}; start the job again when the engine works: failed rows are "
                "retried"
            ) from error


def row_seed(seed: int, custom_id: str) -> int:
    """Returns a row's seed: the same in every run, another for every id."""
    key = f"batch {seed} {custom_id}".encode(errors="backslashreplace")  # allows half surrogates
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")


def _body_of(row: Row, options: BatchOptions) -> dict[str, object]:
    if row.problem is not None:
        raise row.problem
    seed = row_seed(options.seed, row.custom_id)
    body = {"seed": seed, **options.defaults, **row.body}
    if body.get("stream"):
        raise RequestError("stream: rows of a batch cannot be streamed", param="stream")
    if body["seed"] is None:
        body["seed"] = seed
    return body


def _record(
    row: Row, *, status: int, body: Mapping[str, object], error: HttpError | None = None
) -> Json:
    """Returns OpenAI's output line, with the digest of the input line."""
    unique = hashlib.sha256(row.custom_id.encode(errors="backslashreplace")).hexdigest()[:24]
    failure = (
        None if error is None else {"code": error.code or error.type, "message": error.message}
    )
    return {
        "id": f"batch_req_{unique}",
        "custom_id": row.custom_id,
        "response": {"status_code": int(status), "request_id": body.get("id"), "body": body},
        "error": failure,
        "digest": row.digest,
    }


def _manifest_of(model: ServedModel, options: BatchOptions) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "model": model.name,
        "model_identity": model.identity,
        "seed": options.seed,
        "defaults": dict(options.defaults),
    }


def _bar(*, total: int, initial: int, options: BatchOptions) -> Any:
    return tqdm(
        total=total,
        initial=initial,
        unit="row",
        file=sys.stderr,
        disable=not options.show_progress,
    )
