"""The actors of one pipeline: spawned into a placement group, brought together, watched, replaced.

A crew knows processes and generations. What they compute, and whose requests they serve, is none
of its business.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from eesd_dist.actors.contracts import (
    Generation,
    HeadReport,
    LoopEnd,
    RouterAdvice,
    RouterNews,
    StagesFactory,
    TelemetryOptions,
    Whereabouts,
)
from eesd_dist.actors.draft import DraftActor
from eesd_dist.actors.process import thread_environment
from eesd_dist.actors.verify import VerifyActor
from eesd_dist.config import EngineConfig
from eesd_dist.errors import CapacityError, ConfigError, EesdError, EngineError, PeerLost
from serve_app._placement import Post, why_unplaced
from serve_app.config import PlacementConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEAVE_TIMEOUT_S = 8.0
"""A little longer than an actor waits for its own loop to end."""
_GRACE_S = 0.3
"""A killed rank's peers notice a moment before Ray says who has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recruiting:
    """How an actor of this crew is made."""

    pipeline: str
    engine: EngineConfig
    stages: StagesFactory
    telemetry: TelemetryOptions
    ask_router: Callable[[RouterNews], Awaitable[RouterAdvice]] | None

    def with_head(self, folder: str) -> "Recruiting":
        """The same with another exit head."""
        model = self.engine.model.model_copy(update={"head": Path(folder)})
        return replace(self, engine=self.engine.model_copy(update={"model": model}))


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One actor at its post."""

    post: Post
    handle: Any
    whereabouts: Whereabouts
    death: asyncio.Future[None]
    """Done when the process behind the actor is gone."""

    @property
    def label(self) -> str:
        return f"{self.post.name} (pid {self.whereabouts.pid} on {self.whereabouts.host})"

    @property
    def is_dead(self) -> bool:
        return self.death.done()


class Crew:
    """Everyone is at a post, or the crew says who is not."""

    def __init__(
        self, group: PlacementGroup, posts: Sequence[Post], *, recruiting: Recruiting
    ) -> None:
        self._group = group
        self._posts = tuple(posts)
        self._recruiting = recruiting
        self._as_configured = recruiting
        self._members: dict[str, Member] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def members(self) -> tuple[Member, ...]:
        """Who is there, in the order of the posts."""
        return tuple(self._members[p.name] for p in self._posts if p.name in self._members)

    @property
    def drafter(self) -> Member:
        """Raises PeerLost when the post is empty."""
        return self._at(self._posts[0])

    @property
    def has_other_head(self) -> bool:
        """Whether recruits get another exit head than the configuration names."""
        return self._recruiting is not self._as_configured

    def recruit_with_head(self, folder: str) -> None:
        """From now on recruits draft with this exit head."""
        self._recruiting = self._as_configured.with_head(folder)

    async def recruit_as_configured(self) -> None:
        """Everyone who was recruited with another head is sent away."""
        await self.disband()
        for member in self.members:
            self._dismiss(member)
        self._recruiting = self._as_configured

    async def load_head(self, folder: str) -> HeadReport:
        """The drafter takes another exit head, and so will every later one in its place.

        Raises CheckpointError or ConfigError when it does not fit: nothing has changed then.
        """
        report: HeadReport = await self._ask(self.drafter, "load_head", "load_head", folder)
        self.recruit_with_head(folder)
        return replace(report, pipeline=self._recruiting.pipeline)

    async def form(self, *, timeout_s: float) -> None:
        """Fills empty posts and brings everyone into a new generation."""
        self._generation += 1
        operation = f"start of generation {self._generation}"
        try:
            async with asyncio.timeout(timeout_s):
                await _all(self._fill(p, operation) for p in self._posts)
                store = await self._ask(self.drafter, "host_store", operation)
                generation = Generation(
                    number=self._generation,
                    store=store,
                    num_verify_ranks=len(self._posts) - 1,
                    timeout_s=self._recruiting.engine.parallel.timeout_s,
                    shares_gpu=any(0 < p.resources.get("GPU", 0) < 1 for p in self._posts),
                )
                drafter, *ranks = [self._at(post) for post in self._posts]
                await _all(
                    [
                        self._ask(drafter, "connect", operation, generation),
                        *[self._ask(rank, "join", operation, generation) for rank in ranks],
                    ]
                )
                await self._ask(drafter, "join", operation, generation)
        except TimeoutError as error:
            raise PeerLost(
                peer=f"pipeline {self._recruiting.pipeline}",
                operation=operation,
                reason=f"not everyone was there after {timeout_s:g} s",
            ) from error

    async def trouble(self) -> EesdError:
        """Waits until this generation is broken, and says by whom."""
        ends = {
            member: asyncio.ensure_future(
                self._ask(member, "ended", f"generation {self._generation}")
            )
            for member in self.members
        }
        waiting = {*ends.values(), *(member.death for member in self.members)}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not any(member.is_dead for member in self.members):
            await asyncio.wait([m.death for m in self.members], timeout=_GRACE_S)
        for end in ends.values():
            if not end.done():
                end.cancel()
        return self._culprit({m: _result(end) for m, end in ends.items() if end.done()})

    async def disband(self) -> None:
        """Ends the generation: survivors leave it, and who cannot is taken for dead."""
        members = self.members
        left = await asyncio.gather(*[self._leaves(member) for member in members])
        for member, has_left in zip(members, left, strict=True):
            if not has_left:
                self._dismiss(member)

    async def stop(self) -> None:
        await self.disband()
        for member in self.members:
            self._dismiss(member)
        remove_placement_group(self._group)

    def _at(self, post: Post) -> Member:
        member = self._members.get(post.name)
        if member is None or member.is_dead:
            raise PeerLost(peer=post.name, operation="call", reason="its process is gone")
        return member

    async def _fill(self, post: Post, operation: str) -> None:
        member = self._members.get(post.name)
        if member is not None and not member.is_dead:
            return
        handle = self._spawn(post)
        try:
            whereabouts = await handle.whereabouts.remote()
        except BaseException as error:
            ray.kill(handle)  # else it keeps the bundle that the next attempt needs
            if isinstance(error, Exception):
                raise _ours(error, peer=post.name, operation=operation) from error
            raise
        self._members[post.name] = Member(
            post=post,
            handle=handle,
            whereabouts=whereabouts,
            death=asyncio.ensure_future(_death_of(handle)),
        )
        logger.info("recruited: %s", self._members[post.name].label)

    def _spawn(self, post: Post) -> Any:
        how = self._recruiting
        resources = dict(post.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            # Replaced by the pipeline: Ray would take a second longer to say that one has died.
            "max_restarts": 0,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": thread_environment(how.engine.parallel.num_threads)},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._posts.index(post)
            ),
        }
        name = f"{post.name} of {how.pipeline}"
        common = {"name": name, "stages": how.stages, "telemetry": how.telemetry}
        if post.rank is None:
            drafter = ray.remote(DraftActor).options(**options)
            return drafter.remote(how.engine, **common, ask_router=how.ask_router)
        rank = ray.remote(VerifyActor).options(**options)
        return rank.remote(how.engine, **common, rank=post.rank)

    async def _ask(self, member: Member, method: str, operation: str, *args: object) -> Any:
        """Calls an actor; whatever goes wrong comes back as an error of ours that names it."""
        try:
            return await getattr(member.handle, method).remote(*args)
        except Exception as error:
            raise _ours(error, peer=member.label, operation=operation) from error

    async def _leaves(self, member: Member) -> bool:
        if member.is_dead:
            return False
        try:
            return bool(
                await asyncio.wait_for(self._ask(member, "leave", "leave"), _LEAVE_TIMEOUT_S)
            )
        except (EngineError, TimeoutError) as error:
            logger.warning("does not leave: %s error=%r", member.label, error)
            return False

    def _dismiss(self, member: Member) -> None:
        ray.kill(member.handle)
        self._members.pop(member.post.name, None)
        if not member.is_dead:
            member.death.cancel()

    def _culprit(self, ends: dict[Member, EesdError | None]) -> EesdError:
        """The most telling of what is known: a death, then a bug, then a rank's complaint."""
        operation = f"generation {self._generation}"
        for member in self.members:
            if member.is_dead:
                return PeerLost(
                    peer=member.label, operation=operation, reason="its process has died"
                )
        errors = [error for error in ends.values() if error is not None]
        bugs = [error for error in errors if not isinstance(error, PeerLost)]
        of_ranks = [
            error for m, error in ends.items() if error is not None and m.post.rank is not None
        ]
        for candidates in (bugs, of_ranks, errors):
            if candidates:
                return candidates[0]
        return EngineError(f"{operation} of pipeline {self._recruiting.pipeline} ended by itself")


async def placed(posts: Sequence[Post], *, placement: PlacementConfig, name: str) -> PlacementGroup:
    """A placement group with a bundle for each post, or an error that says what is lacking."""
    group = placement_group(
        [post.resources for post in posts], strategy=placement.strategy, name=name
    )
    try:
        await asyncio.wait_for(_when(group.ready()), placement.timeout_s)
    except TimeoutError as error:
        why = why_unplaced(
            posts,
            strategy=placement.strategy,
            nodes={n["NodeID"]: n["Resources"] for n in ray.nodes() if n["Alive"]},
            free=ray.available_resources(),
        )
        remove_placement_group(group)
        raise ConfigError(
            f"no room for pipeline {name} within {placement.timeout_s:g} s: {why}. Change "
            "placement in the configuration, or add nodes"
        ) from error
    return group


async def _all(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """At the same time; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _when(reference: Awaitable[T]) -> T:
    return await reference


async def _death_of(handle: Any) -> None:
    try:
        await handle.forever.remote()
    except ray.exceptions.RayActorError:
        return


def _result(end: "asyncio.Future[LoopEnd]") -> EesdError | None:
    if end.cancelled():
        return None
    error = end.exception()
    if error is not None:
        return error if isinstance(error, EesdError) else EngineError(repr(error))
    return end.result().error


def _ours(error: Exception, *, peer: str, operation: str) -> EesdError:
    """Ray's exceptions in our terms."""
    cause = getattr(error, "cause", None)
    for candidate in (error, cause):
        if isinstance(candidate, EesdError) and not isinstance(candidate, CapacityError):
            return _plain(candidate)
    if isinstance(error, ray.exceptions.RayActorError):
        return PeerLost(peer=peer, operation=operation, reason="its process has died")
    return EngineError(f"{peer} failed during {operation}: {cause or error!r}")


def _plain(error: EesdError) -> EesdError:
    """Without the class that Ray derives on the fly from ours and its own."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, EesdError) else error
