"""The process of one engine of a batch: an actor that answers rows."""

import asyncio
from collections.abc import Sequence

from eesd_dist.errors import EngineError
from eesd_dist.workers.process import prepare_process
from serve_app.batch.loop import BodyOf, RowLoop
from serve_app.batch.results import RowResult
from serve_app.batch.rows import Row
from serve_app.batch.sources import Answering, Source
from serve_app.batch.usage import Usage


class EngineBroken(EngineError):
    """An engine answers nothing any more: its process is of no use."""


class BatchEngine:
    """Answers rows with the engine, or the client of a service, that a source describes."""

    def __init__(self, source: Source, body_of: BodyOf) -> None:
        prepare_process()
        self._source = source
        self._body_of = body_of
        self._opening = asyncio.Lock()
        self._answering: Answering | None = None
        self._loop: RowLoop | None = None
        self._room = asyncio.Semaphore(0)

    async def ping(self) -> None:
        """Returns at once: there is a process."""

    def build(self) -> None:
        """Loads the model. Raises ConfigError where a setting does not fit, EngineError where it
        does not load."""
        self._answering = self._source.build()
        self._room = asyncio.Semaphore(self._answering.max_rows)

    async def open(self) -> int:
        """Loads the model unless that is done; returns how many rows it answers at a time."""
        async with self._opening:
            if self._answering is None:
                self.build()
            answering = self._answering
            assert answering is not None
            if self._loop is None:
                self._loop = RowLoop(
                    await answering.open(),
                    concurrency=1,
                    body_of=self._body_of,
                    max_attempts=answering.max_attempts,
                    patience_s=answering.patience_s,
                )
            return answering.max_rows

    async def waiting_for(self) -> str:
        """Returns why the engine is not open yet, if that is known."""
        return "" if self._answering is None else self._answering.waiting_for()

    async def close(self) -> Usage:
        """Sends what was traced; returns what the engine has used."""
        return Usage() if self._answering is None else self._answering.close()

    async def answer(self, row: Row) -> RowResult:
        """Returns the result of a row. Raises EngineBroken when there will be no other."""
        return (await self.results([row]))[0]

    async def results(self, rows: Sequence[Row]) -> list[RowResult]:
        """Returns results in the order of the rows. Raises EngineBroken when there will be no
        others."""
        await self.open()
        results = await asyncio.gather(*[self._result(row) for row in rows])
        assert self._answering is not None
        if self._answering.is_broken:
            raise EngineBroken(next((r.error for r in results if r.is_engine_failure), "it broke"))
        return results

    async def _result(self, row: Row) -> RowResult:
        assert self._loop is not None
        async with self._room:
            return await self._loop.result_of(row)
