"""A worker as its supervisor sees it: calls, heartbeats, and its death."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray

from eesd_dist.errors import (
    PROCESS_DIED,
    CapacityError,
    CheckpointError,
    ConfigError,
    EesdError,
    EngineError,
    PeerLost,
)
from eesd_dist.workers.messages import Lease, ProcessInfo, WorkerStatus
from eesd_dist.workers.process import PROCESS_LOST
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.pulse import Pulse
from serve_app.pipeline.timings import Timings

logger = logging.getLogger(__name__)

_NODE_DIED = "its node has died"
"""Reason why an actor died, if its node did; Ray's words for it."""

_PID = re.compile(r"\bpid[:=] *(\d+)")
_EXIT_DETAIL = re.compile(
    r"Worker exit detail: (?!Worker unexpectedly exits with a connection error code 2)"
    r"(.{1,200}?)\.?(?: Some common causes| There are some potential|\n|$)"
)
"""Pattern of how a process has ended, where Ray knows more than that its connection did."""

_LOOK_MARGIN_S = 0.01
"""So that a look at the end of a deadline is not too early for it."""


@dataclass(kw_only=True, eq=False)
class Worker:
    """An actor in its slot, with its heartbeats; built inside a running event loop."""

    slot: RankSlot
    """A spare that takes the slot of a lost worker gets another one."""
    handle: Any
    process_info: ProcessInfo
    death: asyncio.Future[str]
    """Done when the process behind the actor is gone; says why."""
    lease: Callable[[], Lease]
    timings: Timings
    host: "Worker | None" = None
    """The verify rank in the same process, for a fallback; None for other workers."""

    def __post_init__(self) -> None:
        self._pulse = Pulse(self.timings)
        self.failure: asyncio.Future[EesdError] = asyncio.get_running_loop().create_future()
        """Done when it does not answer, or makes no progress."""
        self._beating = asyncio.ensure_future(self._beat())

    @property
    def name(self) -> str:
        """Unique; a worker that replaces it has another one, and a new supervisor the same."""
        return f"{self.slot.name} {self.process_info.actor_id}"

    @property
    def label(self) -> str:
        return f"{self.slot.name} (pid {self.process_info.pid} on {self.process_info.host})"

    @property
    def is_dead(self) -> bool:
        return self.death.done()

    @property
    def status(self) -> WorkerStatus:
        """The last heartbeat."""
        return self._pulse.status

    @property
    def still_s(self) -> float:
        """Seconds without progress, or without an answer."""
        return self._pulse.still_s

    def loss(self, operation: str) -> EesdError:
        """Returns why it is lost; `death` or `failure` is done."""
        if not self.is_dead:
            return self.failure.result()
        reason = PROCESS_DIED if self.death.cancelled() else self.death.result()
        return PeerLost(peer=self.label, operation=operation, reason=reason)

    def joined(self, epoch: int) -> None:
        self._pulse.joined(epoch)

    def stop_beating(self) -> None:
        self._beating.cancel()

    def end(self) -> None:
        """Kills its process."""
        self.stop_beating()
        ray.kill(self.handle)
        self.death.cancel()

    async def _beat(self) -> None:
        """Renews the lease and takes the pulse, until the worker is lost."""
        interval_s = self.timings.worker_heartbeat_s
        last_s = time.monotonic()
        call = asyncio.ensure_future(self.ask("beat", "heartbeat", self.lease()))
        try:
            while not (self.is_dead or self.failure.done()):
                await asyncio.wait({call}, timeout=self._until_look_s)
                time_s = time.monotonic()
                # This process may have been stopped, and could then hear nothing.
                self._pulse.passed(min(time_s - last_s, 2 * interval_s))
                last_s = time_s
                if call.done():
                    self._hear(call)
                    await asyncio.sleep(self._until_look_s)
                    call = asyncio.ensure_future(self.ask("beat", "heartbeat", self.lease()))
                if (failure := self._pulse.failure()) is not None and not self.failure.done():
                    self.failure.set_result(self._lost(*failure))
        finally:
            call.cancel()

    @property
    def _until_look_s(self) -> float:
        """A beat, or less where the worker may be lost before."""
        return min(self.timings.worker_heartbeat_s, max(self._pulse.left_s, 0.0) + _LOOK_MARGIN_S)

    def _hear(self, call: "asyncio.Future[WorkerStatus]") -> None:
        error = call.exception()
        if error is None:
            self._pulse.received(call.result())
        elif not isinstance(error, PeerLost) and not self.failure.done():
            # Another supervisor has claimed it.
            self.failure.set_result(error if isinstance(error, EesdError) else self._bug(error))

    def _bug(self, error: BaseException) -> EesdError:
        return EngineError(f"{self.label} failed during heartbeat: {error!r}")

    def _lost(self, operation: str, reason: str) -> PeerLost:
        epoch = self.status.epoch or None
        return PeerLost(peer=self.label, operation=operation, reason=reason, epoch=epoch)

    def fallback(self) -> "Worker":
        """Returns the fallback in a verify rank's process; it dies with it."""
        name = f"fallback in {self.slot.name}"
        return Worker(
            slot=replace(self.slot, name=name, stage="draft", rank=self.slot.rank or None),
            handle=FallbackHandle(self.handle),
            process_info=self.process_info,
            death=self.death,
            lease=self.lease,
            timings=self.timings,
            host=self,
        )

    async def ask(self, method: str, operation: str, *args: object) -> Any:
        """Calls the actor; raises any failure as an EesdError that names it."""
        try:
            return await getattr(self.handle, method).remote(*args)
        except Exception as error:
            raise converted(error, peer=self.label, operation=operation) from error

    async def leaves(
        self,
        trouble: EesdError | None = None,
        *,
        is_crash: bool = False,
        is_suspect: bool = False,
    ) -> bool:
        """Asks it to leave its epoch, for this reason; returns whether it did. A suspect has to do
        it at once: it is probably stuck."""
        if self.is_dead:
            return False
        timings = self.timings
        try:
            if not is_suspect:
                async with asyncio.timeout(timings.ping_s):
                    await self.ask("process_info", "leave")
            async with asyncio.timeout(timings.farewell_s if is_suspect else timings.leave_s):
                has_left = bool(await self.ask("leave", "leave", trouble, is_crash))
        except (EngineError, TimeoutError) as error:
            logger.warning("does not leave: %s error=%r", self.label, error)
            return False
        if has_left:
            self._pulse.joined(0)
        return has_left


async def death_of(handle: Any) -> str:
    """Waits until the process behind an actor is gone; returns why."""
    try:
        await handle.forever.remote()
    except ray.exceptions.RayError as error:
        return _why_gone(error)
    return PROCESS_DIED


def converted(error: Exception, *, peer: str, operation: str) -> EesdError:
    """Returns what a call to an actor has raised as an error of this project."""
    cause = getattr(error, "cause", None)
    for candidate in (error, cause):
        if isinstance(candidate, EesdError) and not isinstance(candidate, CapacityError):
            ours = _plain(candidate)
            # A folder may be intact on one node and damaged on another.
            return ConfigError(f"{peer}: {ours}") if isinstance(ours, CheckpointError) else ours
    if isinstance(error, PROCESS_LOST):
        return PeerLost(peer=peer, operation=operation, reason=_why_gone(error))
    return EngineError(f"{peer} failed during {operation}: {cause or error!r}")


def _why_gone(error: ray.exceptions.RayError) -> str:
    """A process that could not be built reports why in its last line; a killed one cannot."""
    if _NODE_DIED in str(error):
        return _NODE_DIED
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"{PROCESS_DIED}: ended by Ray, since its node ran out of memory"
    if isinstance(error, ray.exceptions.ActorUnavailableError):  # Ray cannot tell which
        return f"{PROCESS_DIED}, or the link to it"
    if not getattr(error, "actor_init_failed", False):
        detail = _EXIT_DETAIL.search(str(error))
        return f"{PROCESS_DIED}: {detail[1]}" if detail else PROCESS_DIED
    return f"it could not be started: {str(error).strip().splitlines()[-1]}"


def pid_of(error: Exception) -> int | None:
    """Returns the process of an actor that has died, if Ray names it."""
    pid = _PID.search(str(error))
    return int(pid[1]) if pid else None


def _plain(error: EesdError) -> EesdError:
    """Removes the class that Ray derives from the error's class and its own."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, EesdError) else error


@dataclass(frozen=True, slots=True)
class FallbackHandle:
    """Replaces the Ray actor handle of a fallback, which answers through the verify rank that it
    lives in; may be sent to other processes like one."""

    host: Any
    """Handle of the verify rank."""

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("__"):  # lookups by copying and pickling
            raise AttributeError(method)
        return _Method(self.host.fallback, method)


@dataclass(frozen=True, slots=True)
class _Method:
    """A remote method of a fallback."""

    call: Any
    name: str

    @property
    def remote(self) -> Callable[..., Any]:
        return lambda *arguments: self.call.remote(self.name, *arguments)
