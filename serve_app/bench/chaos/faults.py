"""The table of faults: every kind that `eesd bench chaos` can inject is one entry.

A kind hits one target of the running service and returns what it hit. It reaches processes and
links through `Means` alone, so that nothing here imports Ray.
"""

import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol

from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.workers.messages import ProcessInfo

if TYPE_CHECKING:
    from serve_app.pipeline.reports import Ledger, PipelineState, WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault of the schedule."""

    number: int
    kind: str
    """A name in the table of faults."""
    when_ready: bool
    """False comes after `gap_s`, whether or not the one before has been recovered from."""
    gap_s: float
    choice: int
    """Which target it hits: taken modulo the number of possible ones."""
    comes_back: bool
    """True for a process that hangs if it continues in the end; otherwise it is killed."""


class Targets(Protocol):
    """The running service. Raises EngineError for what does not answer."""

    async def pipeline(self, choice: int) -> "tuple[PipelineState, Ledger]":
        """Returns one of the pipelines that answer, and its requests."""
        ...

    async def routers(self) -> list[ProcessInfo]: ...
    async def ingresses(self) -> list[ProcessInfo]: ...
    async def proxies(self) -> list[ProcessInfo]:
        """Serve's HTTP proxies, in the same order while none is replaced."""
        ...

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

    async def stop_loop(self, worker: "VictimWorker", *, holding_gil: bool) -> float:
        """Stops the thread of a worker's round loop, and returns when; without the GIL its process
        still answers."""
        ...

    async def resume_loop(self, worker: "VictimWorker") -> None: ...
    async def make_spin(self, worker: "VictimWorker") -> None:
        """Makes the round loop of a drafting actor turn without a round."""
        ...

    def disconnect(self, process: ProcessInfo, other: ProcessInfo) -> int:
        """Shuts every TCP connection between two processes; returns how many there were."""
        ...

    def deafen(self, process: ProcessInfo, other: ProcessInfo) -> int:
        """Makes a process read nothing from another one; returns the number of connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimWorker:
    """A worker, as an actor and as a process."""

    name: str
    pipeline: str
    at: ProcessInfo


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
    """Tools that a fault may use."""

    targets: Targets
    processes: Processes
    links: Links | None
    """None cuts connections on this host instead."""
    afterwards: Callable[[Coroutine[Any, Any, None]], None]
    """Runs work to its end before the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Target of a fault, and the times of the injection and of its effect."""

    victim: str
    injected_s: float
    landed_s: float
    pipeline: "PipelineState | None" = None
    """State of the pipeline before the fault; None where the fault hits no pipeline."""
    replica: bool = False
    """True if it hit the pipeline's replica: the workers go on."""
    ledger: "Ledger | None" = None
    is_replaced: "Callable[[], Awaitable[bool]] | None" = None
    """Tells whether another process has taken the place of one that belongs to no pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """Kind of fault, and its effects."""

    inject: "Callable[[Means, PlannedFault], Awaitable[Hit]]"
    share: int = 1
    """Number of times that it comes in one turn of all kinds."""
    pauses_streams: bool = True
    """True if streams wait until it is mended."""
    breaks_connections: bool = False
    """True if clients resume their streams after it."""
    is_slow: bool = False
    """True if the service notices it by its deadline alone. One of these comes in each turn."""
    needs_tracing: bool = False
    """True if it needs the rights of a debugger."""


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


def _kill_in_front(
    what: str, find: "Callable[[Targets], Awaitable[list[ProcessInfo]]]"
) -> "Callable[[Means, PlannedFault], Awaitable[Hit]]":
    """Returns a fault: SIGKILL to a process that belongs to no pipeline."""

    async def kill(means: Means, planned: PlannedFault) -> Hit:
        before = await find(means.targets)
        at = before[planned.choice % len(before)]

        async def is_replaced() -> bool:
            pids = {process.pid for process in await find(means.targets)}
            return at.pid not in pids and len(pids) >= len(before)

        victim = f"{what} (pid {at.pid})"
        injected_s = time.monotonic()
        await means.processes.send(signal.SIGKILL, to=at, name=victim)
        return Hit(
            victim=victim,
            injected_s=injected_s,
            landed_s=time.monotonic(),
            is_replaced=is_replaced,
        )

    return kill


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


def _stick(*, holding_gil: bool) -> "Callable[[Means, PlannedFault], Awaitable[Hit]]":
    """Returns a fault: a thread that is stuck in a GPU kernel or on a disk, with the GIL or not."""

    async def stick(means: Means, planned: PlannedFault) -> Hit:
        state, ledger = await means.targets.pipeline(planned.choice)
        worker = _one_of(state, ("verify rank", "draft"), planned.choice)
        victim = VictimWorker(name=worker.name, pipeline=state.pipeline, at=_process_of(worker))
        stopped_s = await means.processes.stop_loop(victim, holding_gil=holding_gil)

        async def end() -> None:
            await means.targets.replaced(worker.pid)
            await means.processes.resume_loop(victim)

        means.afterwards(end())
        how = "with" if holding_gil else "without"
        return Hit(
            victim=f"round loop of {_label(worker)}, {how} the GIL",
            injected_s=stopped_s,
            landed_s=stopped_s,
            pipeline=state,
            ledger=ledger,
        )

    return stick


async def _spin(
    means: Means, planned: PlannedFault, state: "PipelineState", ledger: "Ledger"
) -> str:
    worker = _one_of(state, ("drafting actor",), planned.choice)
    at = _process_of(worker)
    spins = VictimWorker(name=worker.name, pipeline=state.pipeline, at=at)
    await means.processes.make_spin(spins)
    return f"round loop of {_label(worker)}, turning without a round"


async def _silence(
    means: Means, planned: PlannedFault, state: "PipelineState", ledger: "Ledger"
) -> str:
    """Connections stay up and the kernel acknowledges what arrives, but a worker reads nothing."""
    worker = _one_of(state, ("verify rank",), planned.choice)
    others = [other for other in state.workers if other.pid != worker.pid]
    at = _process_of(worker)
    num = sum(means.processes.deafen(at, _process_of(other)) for other in others)
    if num == 0:
        raise EngineError(f"{_label(worker)} was not connected")
    return f"{num} connections of {_label(worker)}, which reads nothing from them"


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
    pairs = [
        (worker, other)
        for worker, other in combinations(state.workers, 2)
        if _exchange_rows(_ranks_of(worker, state), _ranks_of(other, state))
    ]
    if not pairs:
        raise EngineError(f"pipeline {state.pipeline} had no two workers just then")
    worker, other = pairs[planned.choice % len(pairs)]
    num = processes.disconnect(_process_of(worker), _process_of(other))
    if num == 0:
        raise EngineError(f"{_label(worker)} and {_label(other)} were not connected")
    return f"{num} connections between {_label(worker)} and {_label(other)}"


def _exchange_rows(ranks: Sequence[str], others: Sequence[str]) -> bool:
    """Within a stage all ranks do; between the stages their first ranks do."""
    return any(
        {rank, other} == {"drafting actor", "verify rank 0"}
        or rank.startswith("draft") == other.startswith("draft")
        for rank in ranks
        for other in others
    )


def _ranks_of(worker: "WorkerReport", state: "PipelineState") -> Sequence[str]:
    """Returns the ranks in the worker's process: a drafting actor may also be verify rank 0."""
    has_verify_rank = any(other.name == "verify rank 0" for other in state.workers)
    if worker.name == "drafting actor" and not has_verify_rank:
        return (worker.name, "verify rank 0")
    return (worker.name,)


def _one_of(state: "PipelineState", prefixes: tuple[str, ...], choice: int) -> "WorkerReport":
    workers = [
        worker
        for worker in state.workers
        if any(name.startswith(prefixes) for name in _ranks_of(worker, state))
    ]
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
    "router": FaultKind(
        inject=_kill_in_front("router", lambda targets: targets.routers()), pauses_streams=False
    ),
    "pipeline": FaultKind(inject=_in_pipeline(_kill_replica, is_replica=True)),
    "link": FaultKind(inject=_in_pipeline(_cut)),
    "hang": FaultKind(inject=_in_pipeline(_freeze), is_slow=True),
    "stuck thread": FaultKind(inject=_stick(holding_gil=False), is_slow=True, needs_tracing=True),
    "stuck thread with the GIL": FaultKind(
        inject=_stick(holding_gil=True), is_slow=True, needs_tracing=True
    ),
    "spinning loop": FaultKind(inject=_in_pipeline(_spin), is_slow=True),
    "silent peer": FaultKind(inject=_in_pipeline(_silence), is_slow=True, needs_tracing=True),
    "ingress": FaultKind(
        inject=_kill_in_front("ingress", lambda targets: targets.ingresses()),
        pauses_streams=False,
        breaks_connections=True,
    ),
    "proxy": FaultKind(
        inject=_kill_in_front("HTTP proxy", lambda targets: targets.proxies()),
        pauses_streams=False,
        breaks_connections=True,
    ),
}
"""Kinds by name, in the order that a schedule shuffles."""
