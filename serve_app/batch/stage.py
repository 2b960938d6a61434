"""The stage of a Ray Data pipeline that generates: actors, each with an engine or a client of a
service.

An engine's process that dies costs the rows in it, and no other process of the job: Ray starts it
again, and its rows are run again, at first apart from others (`serve_app.batch.quarantine`).
"""

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from eesd_dist.errors import EngineError
from serve_app.batch.engine_actor import BatchEngine, EngineBroken
from serve_app.batch.loop import BodyOf
from serve_app.batch.quarantine import poison
from serve_app.batch.results import RowResult, failed
from serve_app.batch.rows import Row
from serve_app.batch.sources import Source

logger = logging.getLogger(__name__)

COLUMN = "row"
"""Column of what travels between stages: pickled, so that no type is guessed from a block."""
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


class GenerateText:
    """Answers batches of `StageRow`s, several at a time."""

    def __init__(
        self, source: Source, quarantine: Any, *, body_of: BodyOf, raises_errors: bool
    ) -> None:
        """`quarantine`: handle of the pipeline's `Quarantine`. `raises_errors`: a failed row ends
        the job."""
        self._engine = BatchEngine(source, body_of)
        self._quarantine = quarantine
        self._raises_errors = raises_errors
        self._name = ray.get_runtime_context().get_actor_id() or str(os.getpid())
        num_lost = ray.get(quarantine.restarted.remote(self._name))
        if num_lost:
            logger.warning("started again after its process died: rows=%d", num_lost)
        self._engine.build()
        self._turns = _Turns()

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, list[bytes]]]:
        rows: list[StageRow] = [pickle.loads(content) for content in batch[COLUMN]]
        results = await self._results([stage_row.row for stage_row in rows])
        yield {
            COLUMN: [
                pickle.dumps(replace(stage_row, result=result))
                for stage_row, result in zip(rows, results, strict=True)
            ]
        }

    async def _results(self, rows: Sequence[Row]) -> list[RowResult]:
        """Returns results in the order of the rows."""
        suspicions = await self._quarantine.suspicions.remote([row.custom_id for row in rows])
        results: dict[int, RowResult] = {}
        groups: list[list[int]] = [[], []]
        for number, suspicion in enumerate(suspicions):
            if suspicion.is_poison:
                await self._quarantine.give_up.remote()
                error = poison(rows[number].custom_id, suspicion)
                results[number] = failed(rows[number], error)
            elif suspicion.runs_alone:
                groups.append([number])
            else:
                groups[bool(suspicion.num_deaths)].append(number)
        for index, group in enumerate(groups):
            if group:
                async with self._turns.exclusive() if index else self._turns.shared():
                    answers = await self._run([rows[number] for number in group])
                results.update(zip(group, answers, strict=True))
        for result in results.values() if self._raises_errors else ():
            if result.has_failed:
                raise EngineError(f"row {result.custom_id}: {result.error}")
        return [results[number] for number in range(len(rows))]

    async def _run(self, rows: Sequence[Row]) -> list[RowResult]:
        custom_ids = [row.custom_id for row in rows]
        await self._quarantine.begin.remote(self._name, custom_ids)
        try:
            results = await self._engine.results(rows)
        except EngineBroken as error:
            logger.error("the engine is started again in a new process: %s", error)
            logging.shutdown()
            os._exit(_BROKEN)  # a process in which a device failed is of no use
        await self._quarantine.end.remote(self._name, custom_ids)
        return results


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
