"""Runs the rows of a batch in a pool of actors, on this machine or on a cluster.

This process reads rows and writes results. Each engine gets another row as soon as one is done, so
that it is as full at the end of the input as at its beginning. An engine that dies is started
again, while the others go on; its rows are run by the next engine that is idle.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.ray_compat import actor_class
from eesd_dist.errors import EesdError, EngineError
from serve_app.batch.engine_actor import BatchEngine
from serve_app.batch.loop import BodyOf, TakeResult
from serve_app.batch.order import in_equal_waves
from serve_app.batch.ray_metrics import RayMetrics
from serve_app.batch.row_queue import RowQueue
from serve_app.batch.rows import Row
from serve_app.batch.sources import Source
from serve_app.batch.usage import Usage
from serve_app.service.connect import our_error

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
"""Starts of one engine in a row that may fail."""
_PATIENCE_S = 20.0
"""Time after which an engine that has no resources is reported, and again after each time ten
times as long."""
_MAX_REASON = 200
_LAST_WORDS_S = 5.0
"""Time that engines have to say what they have used, when all rows are done."""
_MANY = 100_000
"""Calls that an actor takes at a time: the pool sends no more than the engine can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """An `Execution` with engines in actors, on the Ray that this process is connected to."""

    source: Source
    body_of: BodyOf
    num_engines: int
    resources: Mapping[str, float]
    """Ray's resources of each engine's actor."""
    concurrency: int
    """Rows in flight in each engine."""
    num_rows: int
    usage: Usage = field(default_factory=Usage)
    """Use of devices when `run` returns, without engines that died."""

    @property
    def max_in_flight(self) -> int:
        return self.num_engines * self.concurrency

    async def run(self, rows: Iterator[Row], take: TakeResult) -> None:
        """Raises EngineError when the job cannot go on, and what `take` and `rows` raise."""
        metrics = RayMetrics(take, num_rows=self.num_rows)
        queue = RowQueue(rows, metrics.take, num_rows=self.num_rows)
        engines = [PooledEngine(self, queue, number) for number in range(self.num_engines)]
        tasks = {asyncio.ensure_future(engine.run()): engine for engine in engines}
        try:
            await _first_to_end(tasks)
            if running := [task for task, engine in tasks.items() if engine.is_open]:
                await asyncio.wait(running, timeout=_LAST_WORDS_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def start_actor(self, name: str) -> Any:
        options: dict[str, Any] = {"num_cpus": self.resources.get("CPU", 0.0)}
        if self.resources.get("GPU"):
            options["num_gpus"] = self.resources["GPU"]
        actor = actor_class(BatchEngine).options(name=name, max_concurrency=_MANY, **options)
        return actor.remote(self.source, self.body_of)


class StartFailed(Exception):
    """An engine cannot be started."""

    def __init__(self, reason: EesdError) -> None:
        super().__init__(str(reason))
        self.reason = reason


async def _first_to_end(tasks: "Mapping[asyncio.Task[None], PooledEngine]") -> None:
    """Waits for the first engine that has seen that all rows are done. Goes on without engines that
    cannot be started; raises the reason of the last one."""
    running = set(tasks)
    while True:
        ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for task in ended if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, StartFailed):
                raise error
            if len(errors) == len(ended) and not running:
                raise error.reason from error
            logger.error("the job goes on without an engine that does not start: %s", error)
        if len(errors) < len(ended):
            return


def _reason_of(error: RayError) -> str:
    """Returns why an engine has ended, in one line: of a dead process what Ray has seen."""
    if not isinstance(error, RayActorError):
        return str(our_error(error))
    _, _, reason = str(error).partition("The actor is dead because ")
    return " ".join((reason or str(error)).split())[:_MAX_REASON]


class PooledEngine:
    """Engine of the pool: a process, and the one that follows it when it dies."""

    def __init__(self, pool: EnginePool, queue: RowQueue, number: int) -> None:
        self._pool = pool
        self._queue = queue
        self._name = f"batch engine {number}"
        self._actor: Any = None
        self.is_open = False
        """True while it has a process with a model."""
        self._running: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        """Error that ended a row in place of a result; None while there is none."""
        self._wake = asyncio.Event()
        queue.on_change.append(self._wake.set)

    async def run(self) -> None:
        """Returns when all rows of the job have results. Raises StartFailed when the engine cannot
        be started, and what the queue raises."""
        num_starts = num_failed_starts = 0
        while True:
            num_starts += 1
            self._failure, self.is_open = None, False
            self._actor = self._pool.start_actor(f"{self._name}, start {num_starts}")
            try:
                limit = await self._open()
                num_failed_starts = 0
                await self._answer_rows(limit)
                self._pool.usage.add(await self._actor.close.remote())
                return
            except RayError as error:
                if self._queue.is_done:  # it died when it had nothing left to do
                    return
                reason, num_rows = our_error(error), self._queue.died(self._name)
                num_failed_starts += not self.is_open
                if num_failed_starts == _MAX_FAILED_STARTS or not isinstance(reason, EngineError):
                    raise StartFailed(reason) from error
                logger.warning(
                    "%s is started again, and %d rows run again apart: %s",
                    self._name,
                    num_rows,
                    _reason_of(error),
                )
            finally:
                await self._stop()

    async def _open(self) -> int:
        """Waits for resources and the model; returns how many rows the engine may have."""
        needs = ", ".join(f"{name} {amount:g}" for name, amount in self._pool.resources.items())
        await self._patiently(self._actor.ping.remote(), f"no node of the cluster has {needs} free")
        if self._pool.resources:  # those of a pipeline are its own, and may not be there yet
            self._queue.join(self._name)
        max_rows: int = await self._patiently(self._actor.open.remote(), "")
        if not self._pool.resources:
            self._queue.join(self._name)
        self.is_open = True
        return min(max_rows, in_equal_waves(self._pool.concurrency, self._queue.rows_per_engine()))

    async def _patiently(self, call: Any, reason: str) -> Any:
        """Returns the result of a call to the actor; says now and then that it is waited for."""
        result = asyncio.wrap_future(call.future())
        patience_s = _PATIENCE_S
        while not (await asyncio.wait([result], timeout=patience_s))[0]:
            patience_s = 10 * _PATIENCE_S
            logger.warning("%s waits: %s", self._name, reason or await self._reason())
        return result.result()

    async def _reason(self) -> str:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                reason: str = await self._actor.waiting_for.remote()
        except (TimeoutError, RayError):
            reason = ""
        return reason or "it loads the model"

    async def _answer_rows(self, limit: int) -> None:
        is_apart = False
        """True while rows run apart from all others."""
        while not self._queue.is_done:
            self._wake.clear()
            self._raise_failure()
            if not self._running:
                suspects = self._queue.suspects(self._name)
                is_apart = bool(suspects)
                self._start(suspects)
            if not is_apart:
                number = min(limit, self._queue.share()) - len(self._running)
                self._start(self._queue.next(self._name, number))
            if not self._queue.is_done:
                await self._wake.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _start(self, rows: list[Row]) -> None:
        for row in rows:
            task = asyncio.ensure_future(self._answer(row))
            self._running.add(task)
            task.add_done_callback(self._ended)

    async def _answer(self, row: Row) -> None:
        self._queue.end(self._name, await self._actor.answer.remote(row))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        # An error of the output says more than that of an engine.
        if isinstance(error, Exception) and (
            self._failure is None or isinstance(self._failure, RayError)
        ):
            self._failure = error
        self._wake.set()

    async def _stop(self) -> None:
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        ray.kill(self._actor)
