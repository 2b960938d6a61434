"""A running service, its clients and the faults injected into it.

Injects the faults of a schedule while requests go through the service over HTTP, and records what
was hit when, and which streams that concerns. `report` evaluates the records.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eesd_dist.bench.load_client import Streamed, ask_all
from eesd_dist.bench.output import Say
from eesd_dist.errors import EesdError, EngineError
from eesd_dist.workers.epochs.loop import LOOP_THREAD
from eesd_dist.workers.messages import ProcessInfo
from serve_app.bench.chaos.actors import Actors, ThreadStops, answers, make_spin
from serve_app.bench.chaos.faults import Hit, Means, PlannedFault, VictimWorker, fault_named
from serve_app.bench.chaos.reach import Signals, deafen, run_command, sever
from serve_app.bench.chaos.report import InjectedFault, Noticed
from serve_app.bench.chaos.schedule import names_in
from serve_app.config import ServiceConfig
from serve_app.pipeline.reports import Ledger, PipelineState
from serve_app.router.actor import find_router

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.1
_NOTICE_POLL_S = 0.5
_READY_WITHIN_S = 180.0
"""Longest wait for a ready service: if it takes longer, no more faults are injected."""
_STREAM_ATTEMPTS = 200
"""Attempts of a client after its connection broke: for about a minute."""
_MENDING_ATTEMPTS = 5
_MENDING_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCommands:
    """Commands that cut and mend the link of another host, with `{host}` for its address."""

    down: str
    up: str
    cut_s: float


@dataclass(slots=True, kw_only=True)
class Injected:
    """Record of the faults of one run."""

    faults: list[InjectedFault] = field(default_factory=list)
    unnoticed: list[int] = field(default_factory=list)
    """Numbers of faults after which nothing was mended in time."""
    noticed: dict[int, Noticed] = field(default_factory=dict)
    """Reactions by the number of the fault, where a pipeline has noticed it."""
    interruptions_before: int = 0
    """Interruptions in the undisturbed pass, where a deadline is too short for the machine."""
    missed: list[str] = field(default_factory=list)
    """Faults that found no target, and what could not be mended, and why."""
    ended_early: bool = False
    """The service was not ready again in time, and no further fault came."""


class ServiceUnderTest:
    """The running service as its operator reaches it."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._pipelines = serve.get_deployment_handle("Pipeline", config.app_name)
        self.actors = Actors(config.app_name, namespace=config.router.namespace)

    async def states(self) -> list[PipelineState]:
        """Returns the states of the pipelines that answer."""
        return await self._of_all("state")

    async def ledger(self, pipeline: str) -> Ledger | None:
        """None when that pipeline does not answer."""
        ledgers: list[Ledger] = await self._of_all("ledger")
        return next((ledger for ledger in ledgers if ledger.pipeline == pipeline), None)

    async def router(self) -> ProcessInfo:
        """Raises EngineError when it does not answer."""
        try:
            handle = find_router(self._config.router)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                process: ProcessInfo = await handle.process_info.remote()
        except (TimeoutError, RayError) as error:
            raise EngineError(f"the router does not answer: {error!r}") from error
        return process

    async def is_ready(self) -> bool:
        states = await self.states()
        return len(states) >= self._config.pipelines.min_count and all(s.is_ready for s in states)

    async def _of_all(self, method: str) -> list[Any]:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answers = await self._pipelines.broadcast(method).results_async(
                    return_exceptions=True
                )
        except (TimeoutError, RayError, RayServeException) as error:
            logger.info("no answer from the pipelines: method=%s error=%r", method, error)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


class _Targets:
    def __init__(self, service: ServiceUnderTest, *, patience_s: float) -> None:
        self._service = service
        self._patience_s = patience_s

    async def pipeline(self, choice: int) -> tuple[PipelineState, Ledger]:
        states = sorted(await self._service.states(), key=lambda state: state.pipeline)
        if not states:
            raise EngineError("no pipeline answers")
        state = states[choice % len(states)]
        ledger = await self._service.ledger(state.pipeline)
        if ledger is None:
            raise EngineError(f"pipeline {state.pipeline} does not answer")
        return state, ledger

    async def routers(self) -> list[ProcessInfo]:
        return [await self._service.router()]

    async def ingresses(self) -> list[ProcessInfo]:
        return await self._service.actors.ingresses()

    async def proxies(self) -> list[ProcessInfo]:
        return await self._service.actors.proxies()

    async def replaced(self, pid: int) -> bool:
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            states = await self._service.states()
            if states and not any(m.pid == pid for state in states for m in state.workers):
                return True
        return False


class _Processes:
    def __init__(self, service: ServiceUnderTest, signals: Signals) -> None:
        self._service = service
        self._signals = signals
        self._threads = ThreadStops()

    async def stop_loop(self, worker: VictimWorker, *, holding_gil: bool) -> float:
        handle = await self._handle_of(worker)
        return await self._threads.stop(
            LOOP_THREAD, of=worker.at, holding_gil=holding_gil, answers=lambda: answers(handle)
        )

    async def resume_loop(self, worker: VictimWorker) -> None:
        await self._threads.resume(of=worker.at)

    async def make_spin(self, worker: VictimWorker) -> None:
        await make_spin(await self._handle_of(worker))

    async def _handle_of(self, worker: VictimWorker) -> Any:
        actors = self._service.actors
        return await actors.worker(worker.name, pipeline=worker.pipeline, pid=worker.at.pid)

    async def send(self, number: signal.Signals, *, to: ProcessInfo, name: str) -> None:
        if not await self._signals.send(number, to=to):
            raise EngineError(f"{name} had gone already")

    async def release(self, number: signal.Signals, *, of: ProcessInfo) -> None:
        await _persistently(lambda: self._signals.send(number, to=of))

    def disconnect(self, process: ProcessInfo, other: ProcessInfo) -> int:
        return _on_connections(sever, process, other)

    def deafen(self, process: ProcessInfo, other: ProcessInfo) -> int:
        return _on_connections(deafen, process, other)


def _on_connections(
    act: Callable[[int, int], int], process: ProcessInfo, other: ProcessInfo
) -> int:
    try:
        return act(process.pid, other.pid)
    except OSError as error:  # no right to, or one of them has gone
        raise EngineError(
            f"the connections of pids {process.pid} and {other.pid} cannot be reached: {error}"
        ) from error


class _Links:
    def __init__(
        self, commands: LinkCommands, *, afterwards: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._commands = commands
        self._afterwards = afterwards

    @property
    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def cut(self, host: str) -> float:
        # Before it is cut, since a command that fails may have cut half of it.
        self._afterwards(_mend_later(self._commands, host))
        await run_command(self._commands.down, host=host)
        return self._commands.cut_s


class FaultInjector:
    """Injects one fault after the other until it is told to stop."""

    def __init__(
        self,
        service: ServiceUnderTest,
        *,
        signals: Signals,
        links: LinkCommands | None,
        patience_s: float,
    ) -> None:
        """`patience_s`: how long a fault may go unnoticed before the next one comes."""
        self._service = service
        self._patience_s = patience_s
        self._means = Means(
            targets=_Targets(service, patience_s=patience_s),
            processes=_Processes(service, signals),
            links=None if links is None else _Links(links, afterwards=self.afterwards),
            afterwards=self.afterwards,
        )
        self._afterwards: list[asyncio.Task[None]] = []
        self._open: list[tuple[int, Callable[[], Awaitable[bool]]]] = []
        """Faults not known to be mended, by number; each says whether it is."""
        self.injected = Injected()

    async def run(self, plan: Iterator[PlannedFault], *, until: asyncio.Event, say: Say) -> None:
        """Injects one fault at a time; what is frozen or cut off in the end is mended before it
        returns."""
        began_s = time.monotonic()
        try:
            for planned in plan:
                if planned.when_ready and not await self._wait_until_mended(until):
                    break
                if await _is_set_within(until, planned.gap_s):
                    break
                fault = await self._inject(planned, say=say)
                if fault is None:
                    continue
                self.injected.faults.append(fault)
                say(f"{fault.injected_s - began_s:7.1f} s  {fault.kind}: {fault.victim}")
        finally:
            # A repair that fails stops neither the other repairs nor the report.
            ends = await asyncio.gather(*self._afterwards, return_exceptions=True)
            self.injected.missed += [f"mending: {e}" for e in ends if isinstance(e, BaseException)]

    async def count_earlier_interruptions(self) -> None:
        """Notes interruptions that no fault of this run has caused."""
        states = await self._service.states()
        self.injected.interruptions_before = sum(state.num_interruptions for state in states)

    def afterwards(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end before `run` returns."""
        self._afterwards.append(asyncio.create_task(work))

    async def _wait_until_mended(self, until: asyncio.Event) -> bool:
        """Waits until the last fault was noticed and the service is ready; False: stop here."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < _READY_WITHIN_S:
            if await self._is_mended():
                self._open.clear()
                return True
            waited_s = time.monotonic() - began_s
            if waited_s > self._patience_s and await self._service.is_ready():
                self.injected.unnoticed += [
                    number for number, mended in self._open if not await mended()
                ]
                self._open.clear()
                return True
            if await _is_set_within(until, _POLL_S):
                return False
        self.injected.ended_early = True
        self.injected.missed.append(
            f"everything after {_READY_WITHIN_S:g} s without a service that is ready"
        )
        return False

    async def _inject(self, planned: PlannedFault, *, say: Say) -> InjectedFault | None:
        try:
            hit = await fault_named(planned.kind).inject(self._means, planned)
        except (EesdError, RayError, OSError) as error:
            self.injected.missed.append(f"fault {planned.number} ({planned.kind}): {error}")
            return None
        self._open.append((planned.number, lambda: self._is_past(hit)))
        if hit.pipeline is not None and not hit.replica:
            unix_s = time.time() - (time.monotonic() - hit.injected_s)
            self.afterwards(self._note(planned.number, hit.pipeline, unix_s=unix_s, say=say))
        return InjectedFault(
            number=planned.number,
            kind=planned.kind,
            victim=hit.victim,
            pipeline="" if hit.pipeline is None else hit.pipeline.pipeline,
            injected_s=hit.injected_s,
            landed_s=hit.landed_s,
            when_ready=planned.when_ready,
            streams=frozenset() if hit.ledger is None else names_in(hit.ledger.live),
        )

    async def _note(self, number: int, hit: PipelineState, *, unix_s: float, say: Say) -> None:
        """Waits until the pipeline that was hit reports trouble later than `unix_s`."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            for state in await self._service.states():
                noticed_s = (state.last_trouble_unix_s or 0.0) - unix_s
                if state.pipeline == hit.pipeline and noticed_s > 0:
                    trouble = state.last_trouble
                    self.injected.noticed[number] = Noticed(after_s=noticed_s, trouble=trouble)
                    say(f"{'':10} noticed after {noticed_s:.1f} s: {trouble}")
                    return
            await asyncio.sleep(_NOTICE_POLL_S)

    async def _is_mended(self) -> bool:
        return await self._service.is_ready() and all([await mended() for _, mended in self._open])

    async def _is_past(self, hit: Hit) -> bool:
        """Returns whether the process, the replica or the epoch that was hit is no more."""
        if hit.is_replaced is not None:
            try:
                return await hit.is_replaced()
            except EngineError:
                return False
        before = hit.pipeline
        assert before is not None, "a fault hits a process in front or a pipeline"
        states = await self._service.states()
        if hit.replica:
            return bool(states) and not any(state.pid == before.pid for state in states)
        return bool(states) and not any(
            (s.pipeline, s.epoch) == (before.pipeline, before.epoch) for s in states
        )


async def _mend_later(links: LinkCommands, host: str) -> None:
    await asyncio.sleep(links.cut_s)
    await _persistently(lambda: run_command(links.up, host=host))


async def _persistently(mend: Callable[[], Awaitable[object]]) -> None:
    """Repeats an attempt to mend what was cut or stopped, until it succeeds or too many fail."""
    for _ in range(_MENDING_ATTEMPTS - 1):
        try:
            await mend()
            return
        except EngineError as error:
            logger.warning("mending failed, trying again: error=%s", error)
            await asyncio.sleep(_MENDING_PAUSE_S)
    await mend()


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def compared(
    url: str,
    bodies: Sequence[Mapping[str, object]],
    *,
    concurrency: int,
    injector: FaultInjector,
    plan: Iterator[PlannedFault],
    say: Say,
) -> tuple[list[Streamed], list[Streamed]]:
    """Sends the requests undisturbed, and once more while faults are injected.

    Raises EngineError when streams end early in the undisturbed pass.
    """
    say(f"{len(bodies)} requests, undisturbed ...")
    send = partial(ask_all, url, bodies, concurrency=concurrency, max_attempts=_STREAM_ATTEMPTS)
    undisturbed = await send()
    broken = [stream for stream in undisturbed if not stream.is_complete]
    if broken:
        raise EngineError(
            f"{len(broken)} of {len(undisturbed)} streams did not end although nothing was killed: "
            f"{broken[0].name}: {broken[0].error or 'no end was sent'}"
        )
    await injector.count_earlier_interruptions()
    say("the same again, disturbed:")
    is_over = asyncio.Event()
    breaking = asyncio.create_task(injector.run(plan, until=is_over, say=say))
    try:
        disturbed = await send()
    finally:
        is_over.set()
        await breaking
    return undisturbed, disturbed
