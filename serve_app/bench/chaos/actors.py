"""The service's processes as Ray actors: found by name, asked for an answer, stopped in a thread,
made to spin."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ray_compat import proxy_actors, replica_actors
from eesd_dist.errors import EngineError
from eesd_dist.types import Emission, Outcome, RequestId, RoundStats
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import ProcessInfo
from eesd_dist.workers.process import process_info
from eesd_dist.workers.roles import DraftEpoch
from eesd_dist.workers.tenure import pipeline_prefix, workers_named
from serve_app.bench.chaos.threads import ThreadStopper

_ANSWER_TIMEOUT_S = 1.5
_TURN_S = 0.01
_REACH_TIMEOUT_S = 30.0


class Actors:
    """The named actors of one service."""

    def __init__(self, app: str, *, namespace: str) -> None:
        self._app = app
        self._namespace = namespace

    async def worker(self, name: str, *, pipeline: str, pid: int) -> Any:
        """Returns the handle of a worker. Raises EngineError when it does not answer."""
        prefix = pipeline_prefix(self._app, pipeline)
        workers = await asyncio.to_thread(workers_named, prefix, namespace=self._namespace)
        # A spare that has taken a slot keeps the name that it was started with.
        silent: EngineError | None = None
        starts = (f"{prefix}{name}/", f"{prefix}draft spare ", f"{prefix}verify spare ")
        for actor in [actor for start in starts for actor in workers if actor.startswith(start)]:
            handle = await asyncio.to_thread(ray.get_actor, actor, namespace=self._namespace)
            try:
                if (await _process_of(handle)).pid == pid:
                    return handle
            except EngineError as error:  # perhaps a spare that is starting
                silent = error
        raise silent or EngineError(f"{name} of {pipeline} (pid {pid}) is no actor any more")

    async def ingresses(self) -> list[ProcessInfo]:
        replicas = await asyncio.to_thread(replica_actors, self._app, "Ingress")
        return await _processes_of(replicas, kind="ingress replica")

    async def proxies(self) -> list[ProcessInfo]:
        return await _processes_of(await asyncio.to_thread(proxy_actors), kind="HTTP proxy")


async def _processes_of(handles: Sequence[Any], *, kind: str) -> list[ProcessInfo]:
    if not handles:
        raise EngineError(f"there was no {kind} just then")
    return [await _process_of(handle) for handle in handles]


async def answers(handle: Any) -> bool:
    """Returns whether an actor answers a call."""
    try:
        await _process_of(handle)
    except EngineError:
        return False
    return True


async def _process_of(handle: Any) -> ProcessInfo:
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            process: ProcessInfo = await handle.__ray_call__.remote(_process_info)
    except (TimeoutError, RayError) as error:
        raise EngineError(f"no answer within {_ANSWER_TIMEOUT_S:g} s: {error!r}") from error
    return process


def _process_info(actor: object) -> ProcessInfo:
    del actor
    return process_info()


async def make_spin(drafting_actor: Any) -> None:
    """Makes the round loop of a drafting actor turn without a round, until its epoch ends.

    No signal can do that: the loop's steps are replaced, by a call that Ray offers for every actor.
    """
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            is_spinning = await drafting_actor.__ray_call__.remote(_spin)
    except (TimeoutError, RayError) as error:
        raise EngineError(f"its steps cannot be replaced: {error!r}") from error
    if not is_spinning:
        raise EngineError("the drafting actor is between two epochs")


def _spin(actor: DraftActor) -> bool:
    running = actor._streams.running
    if running is not None:
        running.draft_epoch = _Spinning(running.draft_epoch)
    return running is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoResult:
    emissions: tuple[Emission, ...] = ()
    rounds: tuple[RoundStats, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    finished: tuple[RequestId, ...] = ()
    awaits_masks: bool = False
    features: tuple[()] = ()


class _Spinning:
    """The part of a drafting actor in one epoch, with steps that do nothing."""

    def __init__(self, epoch: DraftEpoch) -> None:
        self._part = epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def step(self, *, wait_s: float) -> _NoResult:
        del wait_s
        time.sleep(_TURN_S)
        return _NoResult()


class ThreadStops:
    """Runs `ThreadStopper` on the node of a process, as a Ray actor there."""

    def __init__(self) -> None:
        self._stoppers: dict[int, Any] = {}

    async def stop(
        self,
        thread: str,
        *,
        of: ProcessInfo,
        holding_gil: bool,
        answers: Callable[[], Awaitable[bool]],
    ) -> float:
        """Stops a thread so that its process answers no call, or goes on answering; returns when.

        Tries again while the process shows that the thread was caught in the other state. Raises
        EngineError when it cannot.
        """
        placement = NodeAffinitySchedulingStrategy(of.node_id, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": placement}
        stopper = self._stoppers[of.pid] = ray.remote(ThreadStopper).options(**options).remote()
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                while await stopper.stop.remote(of.pid, thread, interpreting=holding_gil):
                    stopped_s = time.monotonic()
                    if await answers() != holding_gil:
                        await stopper.let_die.remote()
                        return stopped_s
                    await stopper.go_on.remote()
        except (TimeoutError, RayError, OSError) as error:
            await self.resume(of=of)
            raise EngineError(
                f"cannot stop thread {thread} of pid {of.pid} on {of.host}: {error!r}"
            ) from error
        await self.resume(of=of)
        raise EngineError(
            f"pid {of.pid} on {of.host} has no thread {thread} that "
            f"{'computes and holds the GIL' if holding_gil else 'waits and has released the GIL'}"
        )

    async def resume(self, *, of: ProcessInfo) -> None:
        ray.kill(self._stoppers.pop(of.pid))
