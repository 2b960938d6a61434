"""An asynchronous client of an engine in this process.

The loop of the engine runs in a thread; emissions go to the event loop in which the client was
built. For `eesd batch` and for programs that embed the engine.
"""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from eesd_dist.config import EngineConfig
from eesd_dist.devices import HOST
from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.engine.layout import device_named
from eesd_dist.engine.local import EngineThread
from eesd_dist.errors import EesdError
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.telemetry.tracing_options import TracingOptions
from eesd_dist.types import Emission, Request, RequestId
from eesd_dist.workers.streams.mailboxes import Mailboxes
from serve_app.batch.loop import AnswerBody
from serve_app.batch.usage import RoundSample, Usage
from serve_app.openai.context import RequestContext
from serve_app.openai.schema import ChatFields, CompletionFields
from serve_app.openai.text_service import TextService
from serve_app.openai.workloads import Kind

_HOLD_S = 0.1
"""Longest time for which rounds wait for others: a row is read at its end."""


class LocalClient:
    """An `EngineClient` (serve_app.openai.generation). Close it in the end."""

    def __init__(self, engine: EngineCore, *, tracing: Tracing) -> None:
        self._engine = engine
        self._tracing = tracing
        self._mail = Mailboxes()
        self._submissions = count(1)
        self._loop = asyncio.get_running_loop()
        self._started_s = time.monotonic()
        self._rounds = RoundSample()
        self._error: EesdError | None = None
        """The error that ended the loop; None while it runs."""
        self._held: list[StepResult] = []
        """Rounds that the event loop has not seen, in the engine's thread."""
        self._delivered_s = 0.0
        gc.collect()
        gc.freeze()  # modules and the model stay: full collections took a tenth of the time
        self._thread = EngineThread(engine, deliver=self._deliver, broken=self._broken)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """True if the loop has ended with an error: no request is answered any more."""
        return self._error is not None

    def usage(self, engine: EngineConfig) -> Usage:
        """Returns what the engine has used, by its configuration: a GPU, or cores."""
        seconds = time.monotonic() - self._started_s
        if device_named(engine.model.device) != HOST:
            return Usage(gpu_s=seconds, rounds=self._rounds)
        return Usage(core_s=engine.parallel.num_threads * seconds, rounds=self._rounds)

    async def stream(self, request: Request) -> AsyncIterator[tuple[Emission, ...]]:
        if self._error is not None:
            raise self._error
        request = replace(request, submission=next(self._submissions))
        box = self._mail.open(request)
        is_over = False
        try:
            self._engine.add(request)
            while not is_over:
                item = await box.take()
                if isinstance(item, EesdError):
                    is_over = True
                    raise item
                is_over = item[-1].finish_reason is not None
                yield item
        finally:
            was_open = self._mail.close(request.request_id, request.submission)
            if was_open and not is_over:
                self._engine.abort(request.request_id)

    async def abort(self, request_id: RequestId) -> None:
        self._mail.close(request_id)
        self._engine.abort(request_id)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.stop)
        self._engine.close()
        self._tracing.close()

    def _deliver(self, result: StepResult) -> None:
        time_s = time.monotonic()
        self._held.append(result)
        if result.finished or time_s - self._delivered_s >= _HOLD_S:
            held, self._held, self._delivered_s = self._held, [], time_s
            self._loop.call_soon_threadsafe(self._take, held)

    def _take(self, results: Sequence[StepResult]) -> None:
        for result in results:
            self._rounds.observe(result.rounds)
            if self._tracing.rounds is not None:
                for stats in result.rounds:
                    self._tracing.rounds.record_round(stats)
            self._mail.deliver(result.emissions)

    def _broken(self, error: EesdError) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: EesdError) -> None:
        self._error = error
        self._mail.fail_all(error)


def exported_traces(options: TracingOptions) -> Tracing:
    """Returns tracing of this process, off unless it exports: a job shows no kept traces."""
    return make_tracing(replace(options, max_traces_kept=0), process=f"batch-{os.getpid()}")


def answered_by(service: TextService) -> AnswerBody:
    """Returns what answers the rows of a batch with this service."""

    async def answer(kind: Kind, body: Mapping[str, object]) -> bytes:
        fields = (ChatFields if kind == "chat" else CompletionFields).model_validate(body)
        return await service.body(await service.prepared(fields, RequestContext()))

    return answer
