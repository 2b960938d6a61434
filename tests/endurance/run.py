"""Reads what a running service holds while its clients and faults keep it busy."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eesd_dist.bench.load_client import ask_all, client_of
from eesd_dist.bench.output import Say
from eesd_dist.errors import EngineError
from eesd_dist.workers.messages import DraftStats
from serve_app.bench.chaos.faults import PlannedFault
from serve_app.bench.chaos.run import FaultInjector
from tests.endurance.load import Body, Load, References, choices_of
from tests.endurance.processes import Family, num_live_actors, shared_memory_bytes
from tests.endurance.report import IdleReading, Reading

logger = logging.getLogger(__name__)

_READ_EVERY_S = 2.0
_IDLE_EVERY_S = 30.0
_EMPTY_WITHIN_S = 10.0
"""How long it may take until the requests of clients that left are gone."""
_ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.1
_ATTEMPTS = 200


class ServiceReader:
    """Reads the processes of the service, and the pages of its pipelines."""

    def __init__(self, app_name: str) -> None:
        self._pipelines = serve.get_deployment_handle("Pipeline", app_name)
        self._family = Family()

    def reading(self, *, since_s: float) -> Reading:
        return Reading(
            at_s=time.monotonic() - since_s,
            unix_s=time.time(),
            processes=self._family.holdings(),
            shared_memory_bytes=shared_memory_bytes(),
            num_actors=num_live_actors(),
        )

    async def pages_in_use(self) -> int | None:
        """Returns the pages that are neither free nor cached once no request is left, or after a
        time in which none should be; None where no pipeline answers."""
        deadline = time.monotonic() + _EMPTY_WITHIN_S
        while True:
            stats = await self._stats()
            is_empty = stats and not any(
                engine.num_running or engine.num_waiting for engine in stats
            )
            if is_empty or time.monotonic() > deadline:
                return sum(s.num_pages - s.free_pages for s in stats) if stats else None
            await asyncio.sleep(_POLL_S)

    async def _stats(self) -> list[DraftStats]:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                stats: list[DraftStats] = await self._pipelines.broadcast("stats").results_async()
        except Exception as error:  # a worker or a replica is being replaced
            if not isinstance(error, TimeoutError | RayError | RayServeException):
                raise
            logger.info("no answer from the pipelines: error=%r", error)
            return []
        return stats


@dataclass(slots=True, kw_only=True)
class Readings:
    """Everything that was read, in order."""

    busy: list[Reading] = field(default_factory=list)
    idle: list[IdleReading] = field(default_factory=list)


async def endured(
    load: Load,
    reader: ServiceReader,
    *,
    injector: FaultInjector,
    plan: Iterator[PlannedFault],
    run_s: float,
    say: Say,
) -> Readings:
    """Runs the load and the faults for `run_s`; returns all readings."""
    readings, is_over = Readings(), asyncio.Event()
    since_s = time.monotonic()

    async def read() -> None:
        while not is_over.is_set():
            readings.busy.append(await asyncio.to_thread(reader.reading, since_s=since_s))
            await asyncio.sleep(_READ_EVERY_S)

    async def read_idle() -> None:
        while not is_over.is_set():
            await asyncio.sleep(_IDLE_EVERY_S)
            async with load.paused():
                pages = await reader.pages_in_use()
            if pages is not None:
                at_s = time.monotonic() - since_s
                readings.idle.append(IdleReading(at_s=at_s, pages_in_use=pages))

    async def end() -> None:
        await asyncio.sleep(run_s)
        is_over.set()

    await asyncio.gather(
        load.run(is_over), injector.run(plan, until=is_over, say=say), read(), read_idle(), end()
    )
    return readings


async def references_of(
    url: str, streams: Sequence[Body], choices: Sequence[Body], *, concurrency: int
) -> References:
    """Sends every request once. Raises EngineError when one does not succeed."""
    streamed = await ask_all(url, streams, concurrency=concurrency, max_attempts=_ATTEMPTS)
    broken = [stream for stream in streamed if not stream.is_complete]
    if broken:
        raise EngineError(f"the undisturbed stream {broken[0].name} broke: {broken[0].error}")
    async with client_of(url, concurrency=concurrency) as client:
        answers = await asyncio.gather(*[choices_of(client, body) for body in choices])
    for _, error in answers:
        if error is not None:
            raise EngineError(f"an undisturbed request failed: {error}")
    return References(
        streams=list(zip(streams, streamed, strict=True)),
        choices=[(body, texts) for body, (texts, _) in zip(choices, answers, strict=True)],
    )
