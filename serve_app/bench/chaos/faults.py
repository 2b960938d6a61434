"""The table of faults: every kind that `eesd bench chaos` can inject is one entry.

A kind hits one target of the running service and returns what it hit. It reaches processes and
links through `Means` alone, so that nothing here imports Ray.
"""

import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol

from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.workers.loop import LOOP_THREAD
from eesd_dist.workers.messages import ProcessInfo

if TYPE_CHECKING:
    from serve_app.pipeline.deployment import Ledger, PipelineState, WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of the schedule."""

    number: int
    kind: str
    """A name in the table of faults."""
    when_ready: bool
    """False comes after `gap_s`, whether or not the one before has been recovered from."""
    gap_s: float
    choice: int
    """Which target it hits: taken modulo the number of possible ones."""
    comes_back: bool
    """Of a process that hangs: whether it continues in the end, or is killed."""


class Targets(Protocol):
    """The running service. Raises EngineError for what does not answer."""

    async def pipeline(self, choice: int) -> "tuple[PipelineState, Ledger]":
        """One of the pipelines that answer, and its requests."""
        ...

    async def router(self) -> ProcessInfo: ...
    async def replaced(self, pid: int) -> bool:
        """Waits until no pipeline has this process any more; False when that takes too long."""
        ...


class Processes(Protocol):
    """The processes of the service, on any node."""

    async def send(self, number: signal.Signals, *, to: ProcessInfo, name: str) -> None:
        """Raises EngineError when the process is gone."""
        ...

    async def release(self, number: signal.Signals, *, of: ProcessInfo) -> None:
        """Signals a frozen process, again and again while that fails."""
        ...

    async def stop_thread(self, thread: str, *, of: ProcessInfo) -> None:
        """Stops one thread of a process; the others go on."""
        ...

    async def resume_thread(self, *, of: ProcessInfo) -> None: ...
    def disconnect(self, one: ProcessInfo, other: ProcessInfo) -> int:
        """Shuts every TCP connection between two processes; returns how many there were."""
        ...


class Links(Protocol):
    """Network links of other hosts."""

    @property
    def node_id(self) -> str:
        """This node, which has to mend what it cuts."""
        ...

    async def cut(self, host: str) -> float:
        """Cuts the link and mends it later; returns after how many seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a fault may use."""

    targets: Targets
    processes: Processes
    links: Links | None
    """None cuts connections on this host instead."""
    afterwards: Callable[[Coroutine[Any, Any, None]], None]
    """Runs work to its end before the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a fault hit, and when."""

    victim: str
    injected_s: float
    landed_s: float
    pipeline: "PipelineState | None" = None
    """As it was before; None where the fault hits no pipeline."""
    replica: bool = False
    """Whether it hit the pipeline's replica: the workers go on."""
    ledger: "Ledger | None" = None
    router: ProcessInfo | None = None
    """The router that was hit, if one was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault."""

    inject: "Callable[[Means, PlannedFault], Awaitable[Hit]]"
    share: int = 1
    """How often it comes in one turn of all kinds."""
    pauses_streams: bool = True
    """Whether streams wait until it is mended."""


def fault_named(kind: str) -> FaultKind:
    """Raises ConfigError for an unknown kind."""
    try:
        return FAULT_KINDS[kind]
    except KeyError:
        raise ConfigError(
            f"found fault kind {kind!r}, expected one of: {', '.join(FAULT_KINDS)}"
        ) from None


def _in_pipeline(
    hit: "Callable[[Means, PlannedFault, PipelineState, Ledger], Awaitable[str]]",
    *,
    is_replica: bool = False,
) -> "Callable[[Means, PlannedFault], Awaitable[Hit]]":
    """Chooses a pipeline; `hit` returns what it hit there."""

    async def inject(means: Means, planned: PlannedFault) -> Hit:
        state, ledger = await means.targets.pipeline(planned.choice)
        injected_s = time.monotonic()
        victim = await hit(means, planned, state, ledger)
        return Hit(
            victim=victim,
            injected_s=injected_s,
            landed_s=time.monotonic(),
            pipeline=state,
            ledger=ledger,
            replica=is_replica,
        )

    return inject


def _kill(
    *prefixes: str,
) -> "Callable[[Means, PlannedFault, PipelineState, Ledger], Awaitable[str]]":
    """Returns a fault: SIGKILL to a worker with one of these name prefixes."""

    async def kill(
        means: Means, planned: PlannedFault, state: "PipelineState", ledger: "Ledger"
    ) -> str:
        worker = _one_of(state, prefixes, planned.choice)
        await means.processes.send(signal.SIGKILL, to=_process_of(worker), name=_label(worker))
        return _label(worker)

    return kill


async def _kill_replica(
    means: Means, planned: PlannedFault, state: "PipelineState", ledger: "Ledger"
) -> str:
    victim = f"replica of {state.pipeline} (pid {ledger.process_info.pid})"
    await means.processes.send(signal.SIGKILL, to=ledger.process_info, name=victim)
    return victim


async def _kill_router(means: Means, planned: PlannedFault) -> Hit:
    at = await means.targets.router()
    victim = f"router (pid {at.pid})"
    injected_s = time.monotonic()
    await means.processes.send(signal.SIGKILL, to=at, name=victim)
    return Hit(victim=victim, injected_s=injected_s, landed_s=time.monotonic(), router=at)


async def _freeze(
    means: Means, planned: PlannedFault, state: "PipelineState", ledger: "Ledger"
) -> str:
    """SIGSTOP; once the process has been replaced it continues, or is killed."""
    worker = _one_of(state, ("verify rank", "draft"), planned.choice)
    at, label = _process_of(worker), _label(worker)
    await means.processes.send(signal.SIGSTOP, to=at, name=label)

    async def end() -> None:
        continues = await means.targets.replaced(at.pid) and planned.comes_back
        await means.processes.release(signal.SIGCONT if continues else signal.SIGKILL, of=at)

    means.afterwards(end())
    return f"{label}, {'wakes up' if planned.comes_back else 'is killed'}"


async def _stop_loop(
    means: Means, planned: PlannedFault, state: "PipelineState", ledger: "Ledger"
) -> str:
    """Stops the round loop of a process that goes on answering calls, as a stuck kernel does."""
    worker = _one_of(state, ("verify rank", "draft"), planned.choice)
    at = _process_of(worker)
    await means.processes.stop_thread(LOOP_THREAD, of=at)

    async def end() -> None:
        await means.targets.replaced(at.pid)
        await means.processes.resume_thread(of=at)

    means.afterwards(end())
    return f"round loop of {_label(worker)}"


async def _cut(
    means: Means, planned: PlannedFault, state: "PipelineState", ledger: "Ledger"
) -> str:
    if means.links is not None:
        return await _cut_link(means.links, planned, state)
    return _disconnect_pair(means.processes, planned, state)


async def _cut_link(links: Links, planned: PlannedFault, state: "PipelineState") -> str:
    hosts = sorted({m.host for m in state.workers if m.node_id != links.node_id})
    if not hosts:
        raise EngineError("no worker runs on another host than this one")
    host = hosts[planned.choice % len(hosts)]
    return f"link of {host}, for {await links.cut(host):g} s"


def _disconnect_pair(processes: Processes, planned: PlannedFault, state: "PipelineState") -> str:
    """Shuts the connections between two workers that exchange rows."""
    pairs = [pair for pair in combinations(state.workers, 2) if _exchange_rows(*pair)]
    if not pairs:
        raise EngineError(f"pipeline {state.pipeline} had no two workers just then")
    one, other = pairs[planned.choice % len(pairs)]
    num = processes.disconnect(_process_of(one), _process_of(other))
    if num == 0:
        raise EngineError(f"{_label(one)} and {_label(other)} were not connected")
    return f"{num} connections between {_label(one)} and {_label(other)}"


def _exchange_rows(one: "WorkerReport", other: "WorkerReport") -> bool:
    """Within a stage all ranks do; between the stages their first ranks do."""
    names = {one.name, other.name}
    num_drafting = sum(name.startswith("draft") for name in names)
    return names == {"drafting actor", "verify rank 0"} or num_drafting != 1


def _one_of(state: "PipelineState", prefixes: tuple[str, ...], choice: int) -> "WorkerReport":
    workers = [worker for worker in state.workers if worker.name.startswith(prefixes)]
    if not workers:
        raise EngineError(f"pipeline {state.pipeline} had no {' or '.join(prefixes)} just then")
    return workers[choice // 7 % len(workers)]


def _process_of(worker: "WorkerReport") -> ProcessInfo:
    return ProcessInfo(pid=worker.pid, host=worker.host, node_id=worker.node_id)


def _label(worker: "WorkerReport") -> str:
    return f"{worker.name} (pid {worker.pid} on {worker.host})"


FAULT_KINDS: Mapping[str, FaultKind] = {
    "verify rank": FaultKind(inject=_in_pipeline(_kill("verify rank")), share=2),
    "drafting actor": FaultKind(inject=_in_pipeline(_kill("draft"))),
    "router": FaultKind(inject=_kill_router, pauses_streams=False),
    "hang": FaultKind(inject=_in_pipeline(_freeze)),
    "pipeline": FaultKind(inject=_in_pipeline(_kill_replica, is_replica=True)),
    "link": FaultKind(inject=_in_pipeline(_cut)),
    "loop": FaultKind(inject=_in_pipeline(_stop_loop)),
}
"""In the order that a schedule shuffles."""
