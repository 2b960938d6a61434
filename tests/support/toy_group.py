"""The workers of a pipeline as actors in this process: real but for the processes and Ray.

They are called with `.remote`, as Ray's are, and can be killed or frozen. `ToyCluster` is what Ray
would know of them: their names, and which supervisors have died.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError
from eesd_dist.types import Emission, Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers import tenure, worker_actor
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import ProcessInfo, TelemetryOptions, WorkerIdentity
from eesd_dist.workers.rank_actor import RankActor
from eesd_dist.workers.roles import StageFactory
from eesd_dist.workers.tenure import Tenure, pipeline_prefix
from serve_app.ingress.retry import Attempts
from serve_app.pipeline import claim as claim_module
from serve_app.pipeline.placement import placement_groups
from serve_app.pipeline.placement.placement_groups import PlacementGroups
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.supervisor import Supervisor
from serve_app.pipeline.timings import Timings
from serve_app.pipeline.worker import Worker
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import Workers, WorkerSpec
from tests.support.toy_stages import ToyStages, toy_token

APP = "app"
NAMESPACE = "tests"
POLL_S = 0.01
_TICK_S = 0.1

# A lease may end between two tests, when no handler captures its warning.
logging.getLogger(tenure.__name__).addHandler(logging.NullHandler())

_TIMINGS = {
    "deadline_s": 20.0,
    "load_s": 30.0,
    "lease_s": 25.0,
    "worker_heartbeat_s": 0.02,
    "grace_s": 0.01,
    "peers_s": 0.02,
    "retry_s": 0.01,
    "max_retry_s": 0.04,
}


class ToyHandle:
    """An actor that can be killed, or frozen."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.killed = asyncio.Event()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> "_Call":
        self.asked.append(method)
        return _Call(self, method, getattr(self.actor, method))

    async def while_alive(self, answer: "asyncio.Future[Any]") -> Any:
        death = asyncio.ensure_future(self.killed.wait())
        call = asyncio.ensure_future(self._answered(answer))
        try:
            await asyncio.wait({death, call}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done() or self.killed.is_set():
                raise RayActorError
            return call.result()
        finally:
            death.cancel()
            call.cancel()

    async def _answered(self, answer: "asyncio.Future[Any]") -> Any:
        await asyncio.wait({answer})
        await self.thawed.wait()
        return answer.result()


class _Call:
    """A method of an actor in this process, called as Ray's are."""

    def __init__(self, handle: ToyHandle, name: str, method: Callable[..., Any]) -> None:
        self._handle = handle
        self._name = name
        self._method = method

    def remote(self, *arguments: object) -> Any:
        task = asyncio.ensure_future(self._result(*arguments))  # even if the caller stops waiting
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.ensure_future(self._handle.while_alive(task))

    async def _result(self, *arguments: object) -> Any:
        try:
            return await self._method(*arguments)
        except Exception as error:
            raise RayTaskError(self._name, "", error).as_instanceof_cause() from error


class ToyCluster:
    """The named actors and placement groups of this process, and the dead supervisors."""

    def __init__(self) -> None:
        self.actors: dict[str, ToyHandle] = {}
        self.tenures: list[Tenure] = []
        self.dead: set[str] = set()
        self.groups: set[str] = set()

    def kill(self, handle: ToyHandle) -> None:
        handle.killed.set()
        self.actors = {n: h for n, h in self.actors.items() if h is not handle}

    def get_actor(self, name: str, *, namespace: str) -> ToyHandle:
        assert namespace == NAMESPACE
        if name not in self.actors:
            raise ValueError(f"no actor {name}")
        return self.actors[name]

    def list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        return [{"namespace": NAMESPACE, "name": name} for name in self.actors]

    def placement_groups_named(self, prefix: str) -> dict[str, str]:
        return {name: name for name in self.groups if name.startswith(prefix)}

    def close(self) -> None:
        """Ends all leases, and their threads."""
        for lease in self.tenures:
            lease._left_s = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "get_actor", self.get_actor)
        monkeypatch.setattr(ray.util, "list_named_actors", self.list_named_actors)
        monkeypatch.setattr(claim_module, "is_actor_dead", self.dead.__contains__)
        monkeypatch.setattr(claim_module, "remove_placement_group", self.groups.discard)
        for module in (claim_module, placement_groups):
            monkeypatch.setattr(module, "placement_groups_named", self.placement_groups_named)
        table = {"state": "CREATED", "strategy": "PACK", "bundles_to_node_id": {}}
        monkeypatch.setattr(placement_groups, "_table", lambda group: table)
        for module in (worker_actor, tenure):  # Ray would be started to be asked
            own_info = ProcessInfo(pid=1, host="here", node_id="n")
            monkeypatch.setattr(module, "process_info", lambda info=own_info: info)


class ToyWorkers(Workers):
    """Real but for the processes."""

    def __init__(
        self,
        cluster: ToyCluster,
        folder: Path,
        *,
        num_draft_ranks: int = 1,
        fallback: bool = True,
        stages: StageFactory | None = None,
        pipeline: str = "p",
        owner: str = "replica-1",
        digest: str = "d",
        spares: Sequence[RankSlot] = (),
        require_room: Callable[[], None] = lambda: None,
        **timings: float,
    ) -> None:
        self._cluster = cluster
        spec = WorkerSpec(
            app=APP,
            namespace=NAMESPACE,
            pipeline=pipeline,
            digest=digest,
            owner=owner,
            node_id="another node",
            engine=engine_of(folder, num_draft_ranks=num_draft_ranks, fallback=fallback),
            stages=ToyStages() if stages is None else stages,
            telemetry=TelemetryOptions(model_name="toy"),
            ask_router=None,
            timings=toy_timings(**timings),
        )
        slots = (*slots_of(num_draft_ranks), *spares)
        groups = PlacementGroups([], name="p", owner=owner)
        super().__init__(groups, slots, spec=spec, require_room=require_room)

    def _create_actor(self, slot: RankSlot) -> ToyHandle:
        how = self.spec
        identity = WorkerIdentity(
            app=how.app,
            pipeline=how.pipeline,
            slot=slot.name,
            digest=how.digest,
            bundle=self._bundles[slot.name].name,
            mode=slot.mode,
        )
        common: dict[str, Any] = {
            "name": slot.name,
            "stages": how.stages,
            "telemetry": how.telemetry,
            "tenure": partial(self._tenure, identity),
        }
        actor = (
            DraftActor(how.engine, **common)
            if slot.rank is None
            else RankActor(how.engine, **common, stage=slot.stage, rank=slot.rank)
        )
        handle = ToyHandle(actor)
        name = f"{pipeline_prefix(how.app, how.pipeline)}{slot.name}/{uuid4().hex[:8]}"
        self._cluster.actors[name] = handle
        return handle

    def _tenure(self, identity: WorkerIdentity) -> Tenure:
        lease = self.lease()
        tenure = Tenure(
            identity,
            owner=lease.owner,
            lease_s=lease.seconds,
            expired=lambda: None,
            tick_s=_TICK_S,
        )
        self._cluster.tenures.append(tenure)
        return tenure


def slots_of(num_draft_ranks: int) -> tuple[RankSlot, ...]:
    followers = [
        RankSlot(name=f"draft rank {r}", rank=r, resources={}, stage="draft")
        for r in range(1, num_draft_ranks)
    ]
    verify = [RankSlot(name=f"verify rank {r}", rank=r, resources={}) for r in range(2)]
    return (
        RankSlot(name="drafting actor", rank=None, resources={}, stage="draft"),
        *followers,
        *verify,
    )


DRAFT_SPARE = RankSlot(name="draft spare 0", rank=None, resources={}, stage="draft", is_spare=True)
VERIFY_SPARE = RankSlot(name="verify spare 0", rank=0, resources={}, is_spare=True)


def engine_of(folder: Path, *, num_draft_ranks: int, fallback: bool) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "parallel": {
                "draft_tensor_parallel_size": num_draft_ranks,
                "verify_tensor_parallel_size": 2,
                "fallback": fallback,
            },
        }
    )


def toy_timings(**changes: float) -> Timings:
    return Timings(**{**_TIMINGS, **changes})


def handle_of(group: WorkerGroup, name: str) -> ToyHandle:
    (handle,) = [m.handle for m in group.workers if m.slot.name == name]
    assert isinstance(handle, ToyHandle)
    return handle


def slot_of(group: WorkerGroup, name: str) -> RankSlot:
    return next(slot for slot in group.workers.slots if slot.name == name)


def is_filled(group: WorkerGroup) -> bool:
    """Whether every slot has a worker."""
    return not any(group.workers.is_empty(slot) for slot in group.workers.slots)


async def lose(group: WorkerGroup, name: str) -> None:
    """Kills a worker and ends its epoch, so that the next one may be started."""
    trouble = asyncio.ensure_future(group.trouble())
    await asyncio.sleep(0)
    handle_of(group, name).killed.set()
    error = await trouble
    assert name in str(error)
    await group.end_epoch(error)


def supervised(
    group: WorkerGroup | Exception,
    *,
    max_interruptions: int = 4,
    published: Callable[[], None] = lambda: None,
    **timings: float,
) -> Supervisor:
    """Returns the supervisor of this group, or of one that cannot be made."""

    async def make() -> WorkerGroup:
        if isinstance(group, Exception):
            raise group
        return group

    async def publish() -> None:
        published()

    return Supervisor(
        make,
        pipeline="p",
        timings=toy_timings(**timings),
        max_interruptions=max_interruptions,
        publish_status=publish,
    )


async def until(holds: Callable[[], object], *, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  # the actors are no tasks
            await asyncio.sleep(POLL_S)


def toy_request(name: str, *, max_tokens: int, **changes: Any) -> Request:
    fields: Mapping[str, Any] = {"prompt": (TokenId(1),), **changes}
    sampling = SamplingParams(seed=len(name), max_tokens=max_tokens)
    return Request(request_id=RequestId(name), sampling=sampling, **fields)


def expected(request: Request) -> list[TokenId]:
    start = len(request.prompt)
    return [toy_token(request, start + i) for i in range(request.sampling.max_tokens)]


async def emissions_of(leader: Worker, request: Request) -> AsyncIterator[Emission]:
    """Submits a request and reads its stream, as an ingress does; raises the error that ends it."""
    client, last = uuid4().hex, ("", 0)
    await leader.ask("submit", "submit", request, client)
    while True:
        delivery = await leader.ask("take", "take", client, last)
        last = (delivery.outbox, delivery.number)
        for _, _, item in delivery.items:
            if isinstance(item, EesdError):
                raise item
            for emission in item:
                yield emission
                if emission.finish_reason is not None:
                    return


async def answer(leader: Worker, request: Request) -> list[TokenId]:
    return [token async for emission in emissions_of(leader, request) for token in emission.tokens]


class ToyIngress:
    """Reads one stream, and submits it again where an ingress would."""

    def __init__(self, supervisor: Supervisor, request: Request) -> None:
        self.errors: list[EesdError] = []
        """What ended its attempts."""
        self.num_tokens = 0
        self._supervisor = supervisor
        self._request = request
        self._attempts = Attempts(request, suspect_after=2, clock=time.monotonic)

    async def answer(self) -> list[TokenId]:
        """Returns all tokens; raises what ends the stream for the user."""
        for submission in itertools.count():
            try:
                if await self._attempt(submission):
                    break
            except EesdError as error:
                self.errors.append(error)
                await asyncio.sleep(self._attempts.failed(error, patience_s=20.0))
        return list(self._attempts.tokens[len(self._request.prompt) :])

    async def _attempt(self, submission: int) -> bool:
        while not self._supervisor.is_ready:  # as an ingress without the router
            await self._supervisor.check()
            await asyncio.sleep(POLL_S)
        leader = self._supervisor.require_group().leader
        async for emission in emissions_of(leader, self._attempts.next(submission)):
            self._attempts.received((emission,))
            self.num_tokens += len(emission.tokens)
            if emission.finish_reason is not None:
                return True
        return False
