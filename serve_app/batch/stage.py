"""The stage of a Ray Data job that generates: actors, each with an engine or a client of a service.

An engine's process that dies costs the rows in it, and no other process of the job: Ray starts it
again, and its rows are run again, at first apart from others (`serve_app.batch.quarantine`).
"""

import asyncio
import logging
import math
import os
import pickle
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import ray

from eesd_dist.config import EngineConfig
from eesd_dist.engine.local import with_all_cores
from eesd_dist.errors import EesdError, EngineError, PoisonRequest
from eesd_dist.workers.process import prepare_process
from serve_app.batch.http_client import HttpClient
from serve_app.batch.local_client import LocalClient, answered_by
from serve_app.batch.local_engine import LocalModel
from serve_app.batch.loop import AnswerBody, BodyOf, RowLoop
from serve_app.batch.results import RowResult, failed
from serve_app.batch.rows import Row
from serve_app.openai.text_service import TextService

logger = logging.getLogger(__name__)

COLUMN = "row"
"""Column of what travels between stages: pickled, so that no type is guessed from a block."""
NUMBER = "id"
"""Column of the number of a job's batch."""
_BROKEN = 70
"""Exit status of a process with an engine that broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Row on its way through the stages."""

    row: Row
    columns: Mapping[str, Any]
    """The user's columns, which are carried along."""
    result: RowResult | None = None
    """Result; None before the generating stage."""


class Answering(Protocol):
    """Something that answers rows, in the process of an actor."""

    max_attempts: int
    """Attempts at a row under which it fails."""
    max_rows: int
    """Rows that it has at the same time: more would be refused, or wait for nothing."""
    patience_s: float
    """Longest time that a row waits for room."""

    async def open(self) -> AnswerBody: ...
    @property
    def is_broken(self) -> bool:
        """True if nothing is answered in this process any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """Describes an engine of one process; built where the actor runs."""

    engine: EngineConfig
    model_name: str
    has_whole_node: bool
    """Uses all cores of its node; otherwise those that are reserved for it."""

    def build(self) -> "EngineAnswering":
        return EngineAnswering(self)


class EngineAnswering:
    """An engine of this process, with as many threads as it has cores."""

    max_attempts = 1  # one that failed is broken
    patience_s = math.inf

    def __init__(self, source: EngineSource) -> None:
        engine = (with_all_cores if source.has_whole_node else _with_own_cores)(source.engine)
        model = LocalModel.load(engine, name=source.model_name)
        self._preparation = model.preparation
        self._engine = model.build()
        scheduler = engine.scheduler
        self.max_rows = scheduler.max_running + scheduler.max_waiting // 2
        self._client: LocalClient | None = None

    async def open(self) -> AnswerBody:
        self._client = LocalClient(self._engine)
        return answered_by(TextService(self._client, self._preparation))

    @property
    def is_broken(self) -> bool:
        return self._client is not None and self._client.is_broken


def _with_own_cores(engine: EngineConfig) -> EngineConfig:
    if "num_threads" in engine.parallel.model_fields_set:
        return engine
    cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
    parallel = engine.parallel.model_copy(update={"num_threads": max(1, int(cores))})
    return engine.model_copy(update={"parallel": parallel})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSource:
    """Describes a running service."""

    url: str
    api_key: str | None

    def build(self) -> "ServiceAnswering":
        return ServiceAnswering(self)


class ServiceAnswering:
    """A client of a running service."""

    is_broken = False
    max_attempts = 4
    max_rows = 1024
    patience_s = 600.0

    def __init__(self, source: ServiceSource) -> None:
        self._source = source

    async def open(self) -> AnswerBody:
        return HttpClient(self._source.url, api_key=self._source.api_key).answer


class Source(Protocol):
    """Description of what answers rows, which travels to the actors."""

    def build(self) -> Answering: ...


class Generator:
    """Answers rows in the process of an actor."""

    def __init__(
        self, source: Source, quarantine: Any, *, body_of: BodyOf, raises_errors: bool
    ) -> None:
        """`quarantine`: handle of the job's `Quarantine`. `raises_errors`: a failed row ends the
        job."""
        prepare_process()
        self._quarantine = quarantine
        self._raises_errors = raises_errors
        self._body_of = body_of
        self._name = ray.get_runtime_context().get_actor_id() or str(os.getpid())
        num_lost = ray.get(quarantine.restarted.remote(self._name))
        if num_lost:
            logger.warning("started again after its process died: rows=%d", num_lost)
        self._answering = source.build()
        self._loop: RowLoop | None = None
        self._opening = asyncio.Lock()
        self._turns = _Turns()
        self._room = asyncio.Semaphore(self._answering.max_rows)

    async def results(self, rows: Sequence[Row]) -> list[RowResult]:
        """Returns results in the order of the rows."""
        suspicions = await self._quarantine.suspicions.remote([row.custom_id for row in rows])
        results: dict[int, RowResult] = {}
        groups: list[list[int]] = [[], []]
        for number, suspicion in enumerate(suspicions):
            if suspicion.is_poison:
                results[number] = failed(rows[number], _poison(rows[number], suspicion.num_deaths))
            elif suspicion.runs_alone:
                groups.append([number])
            else:
                groups[bool(suspicion.num_deaths)].append(number)
        for index, group in enumerate(groups):
            if group:
                async with self._turns.exclusive() if index else self._turns.shared():
                    answers = await self._run([rows[number] for number in group])
                results.update(zip(group, answers, strict=True))
        return [results[number] for number in range(len(rows))]

    async def _run(self, rows: Sequence[Row]) -> list[RowResult]:
        custom_ids = [row.custom_id for row in rows]
        loop = await self._row_loop()
        await self._quarantine.begin.remote(self._name, custom_ids)
        results = await asyncio.gather(*[self._result(loop, row) for row in rows])
        if self._answering.is_broken:
            reason = next((r.error for r in results if r.is_engine_failure), "it is broken")
            logger.error("the engine is started again in a new process: %s", reason)
            logging.shutdown()
            os._exit(_BROKEN)  # a process in which a device failed is of no use
        await self._quarantine.end.remote(self._name, custom_ids)
        for result in results:
            if result.has_failed and self._raises_errors:
                raise EngineError(f"row {result.custom_id}: {result.error}")
        return results

    async def _result(self, loop: RowLoop, row: Row) -> RowResult:
        async with self._room:
            return await loop.result_of(row)

    async def _row_loop(self) -> RowLoop:
        async with self._opening:
            if self._loop is None:
                answer = await self._answering.open()
                self._loop = RowLoop(
                    answer,
                    concurrency=1,
                    body_of=self._body_of,
                    max_attempts=self._answering.max_attempts,
                    patience_s=self._answering.patience_s,
                )
            return self._loop


class GenerateText:
    """Stage of a processor: answers batches of `StageRow`s, several at a time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes the arguments of `Generator`."""
        self._generator = Generator(*arguments, **options)

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, list[bytes]]]:
        rows: list[StageRow] = [pickle.loads(content) for content in batch[COLUMN]]
        results = await self._generator.results([stage_row.row for stage_row in rows])
        yield {
            COLUMN: [
                pickle.dumps(replace(stage_row, result=result))
                for stage_row, result in zip(rows, results, strict=True)
            ]
        }


class AnswerBatches:
    """Stage of a job: fetches batches of rows by their numbers, and answers them."""

    def __init__(self, feed: Any, *arguments: Any, **options: Any) -> None:
        """Takes the handle of the job's `RowFeed`, and the arguments of `Generator`."""
        self._feed = feed
        self._generator = Generator(*arguments, **options)

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, list[Any]]]:
        for number in batch[NUMBER].tolist():
            content = await self._feed.get.remote(number)
            rows: list[Row] = pickle.loads(content) if content else []
            results = await self._generator.results(rows)
            yield {NUMBER: [number], COLUMN: [pickle.dumps(results)]}


class _Turns:
    """Lets many run at the same time, or one alone."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._gate:
            self._num_running += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._gate:
            await self._idle.wait()
            yield


def _poison(row: Row, num_deaths: int) -> EesdError:
    return PoisonRequest(
        request_id=row.custom_id,
        crashes=num_deaths,
        reason="the engine's process died each time, at last while it ran alone",
    )
