"""Runs the rows of a batch in this event loop: with an engine of this process, or a service.

Rows run concurrently, so that a long answer delays no other row. What may succeed later is tried
again; a service that is away is waited for, as a full queue is.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from eesd_dist.errors import CapacityError, EesdError, EngineError, PoisonRequest, RequestError
from serve_app.batch.results import RowResult, answered, failed
from serve_app.batch.rows import Row, row_seed
from serve_app.batch.usage import Usage
from serve_app.openai.workloads import Kind

logger = logging.getLogger(__name__)

AnswerBody = Callable[[Kind, Mapping[str, object]], Awaitable[bytes]]
"""Answers the body of a row as the HTTP API does, with JSON in one line."""
BodyOf = Callable[[Row], dict[str, object]]
"""Returns the body that a row asks for; raises RequestError for a row that cannot be run."""
TakeResult = Callable[[RowResult], None]

_MAX_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 10.0
_PATIENCE_S = 600.0
"""Longest time that a row waits for a service that is away or has no room."""


class ServiceAway(EngineError):
    """A service that does not answer now: no fault of the row."""


class RowLoop:
    """Answers rows, so many of them at the same time."""

    def __init__(
        self,
        answer: AnswerBody,
        *,
        concurrency: int,
        body_of: BodyOf,
        max_attempts: int = _MAX_ATTEMPTS,
        patience_s: float = _PATIENCE_S,
        usage_of: Callable[[], Usage] = Usage,
    ) -> None:
        """`max_attempts`: at a row under which the engine fails. `usage_of`: returns what an engine
        of this process has used."""
        self._answer = answer
        self.max_in_flight = concurrency
        self._body_of = body_of
        self._max_attempts = max_attempts
        self._patience_s = patience_s
        self._usage_of = usage_of
        self._is_waiting = False
        """True while no row was answered since the service was away."""

    async def run(self, rows: Iterator[Row], take: TakeResult) -> None:
        """Takes the next row as soon as one is done. Raises what `take` and `rows` raise."""
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.max_in_flight):
                    workers.create_task(self._run_some(rows, take))
        except* Exception as group:
            raise group.exceptions[0] from None

    @property
    def usage(self) -> Usage:
        """Use of devices so far; none of a service."""
        return self._usage_of()

    async def _run_some(self, rows: Iterator[Row], take: TakeResult) -> None:
        for row in rows:
            take(await self.result_of(row))

    async def result_of(self, row: Row) -> RowResult:
        try:
            return answered(row, await self._answered(row))
        except Exception as error:  # one bad row is one error record and nothing more
            return failed(row, error)

    async def _answered(self, row: Row) -> bytes:
        """Returns the answer; retries what may succeed later."""
        body = self._body_of(row)
        num_attempts = 0
        pause_s = _FIRST_PAUSE_S
        gives_up_s: float | None = None
        while True:
            try:
                answer = await self._answer(row.kind, body)
            except (CapacityError, ServiceAway) as error:
                gives_up_s = gives_up_s or time.monotonic() + self._patience_s
                if time.monotonic() > gives_up_s:
                    raise
                self._say_that_it_waits(error)
                if isinstance(error, CapacityError):
                    await asyncio.sleep(error.retry_after_s)
                    continue
            except PoisonRequest:
                raise
            except EngineError as error:
                num_attempts += 1
                if num_attempts == self._max_attempts:
                    raise
                logger.warning("row will be tried again: id=%s error=%s", row.custom_id, error)
            else:
                self._is_waiting = False
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _say_that_it_waits(self, error: EesdError) -> None:
        if isinstance(error, ServiceAway) and not self._is_waiting:
            self._is_waiting = True
            logger.warning("the service is waited for, for up to %g s: %s", self._patience_s, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """The bodies of a job's rows: a `BodyOf`."""

    seed: int = 0
    defaults: Mapping[str, object] = field(default_factory=dict)
    overrides: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, row: Row) -> dict[str, object]:
        if row.problem is not None:
            raise row.problem
        seed = row_seed(self.seed, row.custom_id)
        body = {"seed": seed, **self.defaults, **row.body, **self.overrides}
        if body.get("stream"):
            raise RequestError("stream: rows of a batch cannot be streamed", param="stream")
        if body["seed"] is None:
            body["seed"] = seed
        return body
