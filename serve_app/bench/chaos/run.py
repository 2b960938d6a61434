"""A service, its clients and somebody who breaks it: the doing half of `eesd bench chaos`.

Deals the blows of a schedule to the processes and links of a running service while requests go
through it over HTTP, and writes down what was struck when, and whose streams that hit. What follows
from it is `serve_app.bench.chaos.schedule`'s to say.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eesd_dist.bench.streamed import Listener, Streamed, stream
from eesd_dist.errors import EesdError, EngineError
from eesd_dist.workers.messages import Whereabouts
from serve_app.bench.chaos.faults import Signals, run_command, sever
from serve_app.bench.chaos.schedule import Blow, Planned, names_in
from serve_app.config import ServiceConfig
from serve_app.pipeline.deployment import Ledger, MemberReport, PipelineState
from serve_app.router import find_router

logger = logging.getLogger(__name__)

Say = Callable[[str], None]

_ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.1
_WHOLE_WITHIN_S = 180.0
"""A service that takes longer is left alone, and its streams say what became of them."""
_STREAM_TIMEOUT_S = 300.0
_MENDING_ATTEMPTS = 5
_MENDING_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCommands:
    """How the link of another host is cut and mended, with `{host}` for its address."""

    down: str
    up: str
    cut_s: float


@dataclass(slots=True, kw_only=True)
class Dealt:
    """What was done to the service."""

    blows: list[Blow] = field(default_factory=list)
    unnoticed: list[int] = field(default_factory=list)
    """Numbers of blows after which nothing was mended in time."""
    interruptions_before: int = 0
    """Of the pass that was not to be disturbed: a deadline too short for the machine."""
    missed: list[str] = field(default_factory=list)
    """Blows that found nobody to hit, and what could not be mended, and why."""
    ended_early: bool = False
    """The service was not whole again in time, and nothing was done to it any more."""


async def ask_all(
    url: str, bodies: Sequence[Mapping[str, object]], *, concurrency: int
) -> list[Streamed]:
    """All requests to their ends, so many at a time, in their order."""
    limits = httpx.Limits(max_connections=concurrency)
    timeout = httpx.Timeout(_STREAM_TIMEOUT_S)
    heard: dict[int, Streamed] = {}
    waiting = iter(enumerate(bodies))

    async def work(client: httpx.AsyncClient) -> None:
        for index, body in waiting:
            listener = Listener(str(body["request_id"]))
            await stream(client, listener, body)
            heard[index] = listener.heard()

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
        await asyncio.gather(*[work(client) for _ in range(concurrency)])
    return [heard[index] for index in range(len(bodies))]


class Service:
    """The running service as its operator reaches it."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._pipelines = serve.get_deployment_handle("Pipeline", config.app_name)

    async def states(self) -> list[PipelineState]:
        """Of the pipelines that answer."""
        return await self._of_all("state")

    async def ledger(self, pipeline: str) -> Ledger | None:
        """None when that pipeline does not answer."""
        ledgers: list[Ledger] = await self._of_all("ledger")
        return next((ledger for ledger in ledgers if ledger.pipeline == pipeline), None)

    async def router(self) -> Whereabouts:
        """Raises EngineError when it does not answer."""
        try:
            handle = find_router(self._config.router)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                found: Whereabouts = await handle.whereabouts.remote()
        except (TimeoutError, RayError) as error:
            raise EngineError(f"the router does not answer: {error!r}") from error
        return found

    async def is_whole(self) -> bool:
        states = await self.states()
        return len(states) >= self._config.pipelines.min_count and all(s.is_whole for s in states)

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


class Breaker:
    """Deals one blow after the other until it is told that enough is enough."""

    def __init__(
        self, service: Service, *, signals: Signals, links: LinkCommands | None, patience_s: float
    ) -> None:
        """`patience_s`: how long a blow may go unnoticed before the next one is planned for."""
        self._service = service
        self._signals = signals
        self._links = links
        self._patience_s = patience_s
        self._afterwards: list[asyncio.Task[None]] = []
        self._wounds: list[tuple[int, Callable[[], Awaitable[bool]]]] = []
        """The blows that dealt them; each says whether it has healed."""
        self.dealt = Dealt()

    async def run(self, plan: Iterator[Planned], *, until: asyncio.Event, say: Say) -> None:
        """One blow at a time; what hangs or is cut off in the end is mended before it returns."""
        began_s = time.monotonic()
        try:
            for planned in plan:
                if planned.when_whole and not await self._wait_until_mended(until):
                    break
                if await _is_set_within(until, planned.gap_s):
                    break
                blow = await self._strike(planned)
                if blow is None:
                    continue
                self.dealt.blows.append(blow)
                say(f"{blow.struck_s - began_s:7.1f} s  {blow.kind}: {blow.victim}")
        finally:
            # One that fails leaves the others to mend what is theirs, and the report unharmed.
            ends = await asyncio.gather(*self._afterwards, return_exceptions=True)
            self.dealt.missed += [f"mending: {e}" for e in ends if isinstance(e, BaseException)]

    async def look_around(self) -> None:
        """Notes what broke although nobody has struck yet."""
        states = await self._service.states()
        self.dealt.interruptions_before = sum(state.num_interruptions for state in states)

    async def _wait_until_mended(self, until: asyncio.Event) -> bool:
        """Until the last blow was noticed and the service is whole again; False: stop here."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < _WHOLE_WITHIN_S:
            if await self._is_mended():
                self._wounds.clear()
                return True
            waited_s = time.monotonic() - began_s
            if waited_s > self._patience_s and await self._service.is_whole():
                self.dealt.unnoticed += [
                    number for number, healed in self._wounds if not await healed()
                ]
                self._wounds.clear()
                return True
            if await _is_set_within(until, _POLL_S):
                return False
        self.dealt.ended_early = True
        self.dealt.missed.append(f"everything after {_WHOLE_WITHIN_S:g} s without a whole service")
        return False

    async def _strike(self, planned: Planned) -> Blow | None:
        try:
            return await self._dealt(planned)
        except (EesdError, RayError, OSError) as error:
            self.dealt.missed.append(f"blow {planned.number} ({planned.kind}): {error}")
            return None

    async def _dealt(self, planned: Planned) -> Blow:
        if planned.kind == "router":
            return await self._kill_router(planned)
        states = sorted(await self._service.states(), key=lambda state: state.pipeline)
        if not states:
            raise EngineError("no pipeline was there")
        state = states[planned.choice % len(states)]
        ledger = await self._service.ledger(state.pipeline)
        if ledger is None:
            raise EngineError(f"pipeline {state.pipeline} was not there")
        struck_s = time.monotonic()
        victim = await self._hit(planned, state, ledger)
        landed_s = time.monotonic()
        self._wounds.append((planned.number, lambda: self._is_past(state)))
        return Blow(
            number=planned.number,
            kind=planned.kind,
            victim=victim,
            pipeline=state.pipeline,
            struck_s=struck_s,
            landed_s=landed_s,
            when_whole=planned.when_whole,
            streams=names_in(ledger.live),
        )

    async def _hit(self, planned: Planned, state: PipelineState, ledger: Ledger) -> str:
        match planned.kind:
            case "pipeline":
                victim = f"replica of {state.pipeline} (pid {ledger.whereabouts.pid})"
                await self._kill(ledger.whereabouts, victim)
            case "link" if self._links is not None:
                victim = await self._cut_off(planned, state, self._links)
            case "link":
                victim = _sever_one(state, planned.choice)
            case "hang":
                member = _one_of(state, ("verify rank", "draft"), planned.choice)
                await self._hang(planned, member)
                victim = f"{_label(member)}, {'wakes up' if planned.comes_back else 'is killed'}"
            case _:
                prefix = "verify rank" if planned.kind == "verify rank" else "draft"
                member = _one_of(state, (prefix,), planned.choice)
                victim = _label(member)
                await self._kill(_whereabouts(member), victim)
        return victim

    async def _kill_router(self, planned: Planned) -> Blow:
        at = await self._service.router()
        struck_s = time.monotonic()
        await self._kill(at, "router")
        landed_s = time.monotonic()
        self._wounds.append((planned.number, lambda: self._is_other_router(at)))
        return Blow(
            number=planned.number,
            kind=planned.kind,
            victim=f"router (pid {at.pid})",
            pipeline="",
            struck_s=struck_s,
            landed_s=landed_s,
            when_whole=planned.when_whole,
            streams=frozenset(),
        )

    async def _kill(self, at: Whereabouts, victim: str) -> None:
        if not await self._signals.send(signal.SIGKILL, to=at):
            raise EngineError(f"{victim} had gone already")

    async def _hang(self, planned: Planned, member: MemberReport) -> None:
        at = _whereabouts(member)
        if not await self._signals.send(signal.SIGSTOP, to=at):
            raise EngineError(f"{_label(member)} had gone already")
        self._afterwards.append(asyncio.create_task(self._end_hang(planned, at)))

    async def _end_hang(self, planned: Planned, at: Whereabouts) -> None:
        """Once it has been found out and replaced; who is not found in time is killed too."""
        deadline = time.monotonic() + self._patience_s
        is_found = False
        while not is_found and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            states = await self._service.states()
            is_found = bool(states) and not any(m.pid == at.pid for s in states for m in s.members)
        wakes_up = planned.comes_back and is_found
        number = signal.SIGCONT if wakes_up else signal.SIGKILL
        await _persistently(lambda: self._signals.send(number, to=at))

    async def _cut_off(self, planned: Planned, state: PipelineState, links: LinkCommands) -> str:
        """The link of a node that is not this one: somebody has to be here to mend it."""
        here = ray.get_runtime_context().get_node_id()
        hosts = sorted({member.host for member in state.members if member.node_id != here})
        if not hosts:
            raise EngineError("no member runs on another host than this one")
        host = hosts[planned.choice % len(hosts)]
        # Before it is cut, since a command that fails may have cut half of it.
        self._afterwards.append(asyncio.create_task(_mend_later(links, host)))
        await run_command(links.down, host=host)
        return f"link of {host}, for {links.cut_s:g} s"

    async def _is_mended(self) -> bool:
        return await self._service.is_whole() and all(
            [await healed() for _, healed in self._wounds]
        )

    async def _is_past(self, struck: PipelineState) -> bool:
        """Whether the generation that was struck is no more."""
        states = await self._service.states()
        return bool(states) and not any(
            (s.pipeline, s.generation) == (struck.pipeline, struck.generation) for s in states
        )

    async def _is_other_router(self, before: Whereabouts) -> bool:
        try:
            return (await self._service.router()).pid != before.pid
        except EngineError:
            return False


def _sever_one(state: PipelineState, choice: int) -> str:
    """Cuts what connects two members between whom rounds go to and fro."""
    pairs = [pair for pair in combinations(state.members, 2) if _exchange_rows(*pair)]
    if not pairs:
        raise EngineError(f"pipeline {state.pipeline} had no two members just then")
    one, other = pairs[choice % len(pairs)]
    try:
        num = sever(one.pid, other.pid)
    except OSError as error:  # no right to, or one of them has gone
        raise EngineError(
            f"{_label(one)} and {_label(other)} cannot be disconnected: {error}"
        ) from error
    if num == 0:
        raise EngineError(f"{_label(one)} and {_label(other)} were not connected")
    return f"{num} connections between {_label(one)} and {_label(other)}"


def _exchange_rows(one: MemberReport, other: MemberReport) -> bool:
    """Within a stage everybody does; between the stages their first ranks do."""
    names = {one.name, other.name}
    num_drafting = sum(name.startswith("draft") for name in names)
    return names == {"drafting actor", "verify rank 0"} or num_drafting != 1


async def _mend_later(links: LinkCommands, host: str) -> None:
    await asyncio.sleep(links.cut_s)
    await _persistently(lambda: run_command(links.up, host=host))


async def _persistently(mend: Callable[[], Awaitable[object]]) -> None:
    """Nothing may stay cut or stopped because one attempt to mend it has failed."""
    for _ in range(_MENDING_ATTEMPTS - 1):
        try:
            await mend()
            return
        except EngineError as error:
            logger.warning("mending failed, trying again: error=%s", error)
            await asyncio.sleep(_MENDING_PAUSE_S)
    await mend()


def _one_of(state: PipelineState, prefixes: tuple[str, ...], choice: int) -> MemberReport:
    members = [member for member in state.members if member.name.startswith(prefixes)]
    if not members:
        raise EngineError(f"pipeline {state.pipeline} had no {' or '.join(prefixes)} just then")
    return members[choice // 7 % len(members)]


def _whereabouts(member: MemberReport) -> Whereabouts:
    return Whereabouts(pid=member.pid, host=member.host, node_id=member.node_id)


def _label(member: MemberReport) -> str:
    return f"{member.name} (pid {member.pid} on {member.host})"


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
    breaker: Breaker,
    plan: Iterator[Planned],
    say: Say,
) -> tuple[list[Streamed], list[Streamed]]:
    """The requests undisturbed, and once more while the service is broken under them.

    Raises EngineError when streams end early although nobody disturbs them.
    """
    say(f"{len(bodies)} requests, undisturbed ...")
    undisturbed = await ask_all(url, bodies, concurrency=concurrency)
    broken = [stream for stream in undisturbed if not stream.is_complete]
    if broken:
        raise EngineError(
            f"{len(broken)} of {len(undisturbed)} streams did not end although nothing was killed: "
            f"{broken[0].name}: {broken[0].error or 'no end was sent'}"
        )
    await breaker.look_around()
    say("the same again, disturbed:")
    is_over = asyncio.Event()
    breaking = asyncio.create_task(breaker.run(plan, until=is_over, say=say))
    try:
        disturbed = await ask_all(url, bodies, concurrency=concurrency)
    finally:
        is_over.set()
        await breaking
    return undisturbed, disturbed
