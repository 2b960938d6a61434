"""Keeps one pipeline ready: observes its workers, and does what the lifecycle's table says.

The table is `lifecycle`, the doing `worker_group`. Streams do not pass through here: ingresses read
them from the drafting actor. A supervisor that dies loses nothing but time: the workers go on, and
the supervisor of the next replica claims them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from eesd_dist.errors import ConfigError, EesdError, EngineError, LeaseLost, Migrated, PeerLost
from eesd_dist.routing.directory import Promotion, RankLoad, StartReport
from eesd_dist.workers.messages import HeadReport
from serve_app.pipeline.interruptions import Interruptions
from serve_app.pipeline.lifecycle import Action, EpochKind, SupervisedState, next_action
from serve_app.pipeline.timings import Timings
from serve_app.pipeline.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_LAST_ACTIONS = (Action.RELEASE, Action.GIVE_UP)
DEGRADED = "plain decoding on the verify ranks while the drafting actor is replaced"


@dataclass(slots=True)
class _Backoff:
    """The pause before a failed attempt is repeated."""

    timings: Timings
    pause_s: float = 0.0
    until_s: float = 0.0

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def failed(self) -> None:
        self.pause_s = min(2 * self.pause_s or self.timings.retry_s, self.timings.max_retry_s)
        self.until_s = time.monotonic() + self.pause_s

    def worked(self) -> None:
        self.pause_s = self.until_s = 0.0


class Supervisor:
    """Supervises one pipeline; built inside a running event loop."""

    def __init__(
        self,
        group: Callable[[], Awaitable[WorkerGroup]],
        *,
        pipeline: str,
        timings: Timings,
        max_interruptions: int,
        publish_status: Callable[[], Awaitable[None]],
        waiting_for: Callable[[], str] = lambda: "",
    ) -> None:
        """`group` places the workers, or claims those of a dead supervisor; `waiting_for` says what
        it waits for; `publish_status` sends this pipeline's state to the router.
        `max_interruptions` in a row, without progress, end the pipeline."""
        self._pipeline = pipeline
        self._timings = timings
        self._max_interruptions = max_interruptions
        self._publish_status = publish_status
        self._waiting_for = waiting_for
        self._stopping = asyncio.Event()
        """Set once Serve takes this pipeline down."""
        self.interruptions = Interruptions(pipeline)
        self._is_broken = False
        """The present epoch is."""
        self._fatal: EesdError | None = None
        """Error for which the pipeline is given up; None while it is not."""
        self._is_head_unloadable = False
        self._has_fallback_failed = False
        self._backoff = _Backoff(timings)
        self._loading_since_s = time.monotonic()
        """Time since which every bundle has a node, and the present start is not over."""
        self.has_started = False
        """True if it has been ready before."""
        self.promotion: Promotion | None = None
        """The promoted exit head; None: that of the configuration."""
        self.group: WorkerGroup | None = None
        """None before its workers are placed or claimed, or if they never will be."""
        self._supervising = asyncio.ensure_future(self._supervise(group))

    def require_group(self) -> WorkerGroup:
        """Returns the worker group. Raises EngineError with the reason why there is none."""
        if self.group is None:
            raise EngineError(f"pipeline {self._pipeline} has no workers: {self.why_unavailable()}")
        return self.group

    @property
    def epoch(self) -> int:
        return 0 if self.group is None else self.group.epoch

    @property
    def is_ready(self) -> bool:
        """True while rounds go through: there is an epoch, and every worker in it makes
        progress."""
        return not self.why_unavailable()

    @property
    def is_degraded(self) -> bool:
        """True while it is ready with fallbacks for the draft stage."""
        return self.group is not None and self.group.is_degraded and self.is_ready

    @property
    def degraded_s(self) -> float:
        """Seconds of degraded epochs so far."""
        return self.interruptions.degraded_s

    @property
    def start_s(self) -> float | None:
        """Seconds of the longest start of a full epoch, weights included; None before the first."""
        return None if self.group is None else self.group.workers.start_s

    def why_unavailable(self) -> str:
        """Returns the reason, or an empty string if the pipeline is ready."""
        if self._fatal is not None:
            return f"given up: {self._fatal}"
        trouble, waited_s = self.interruptions.trouble, self.interruptions.waited_s
        group = self.group
        if group is None:
            return f"starting for {waited_s:.1f} s: {self._waiting_for() or trouble}"
        why = ". ".join([str(trouble), *group.workers.placement_groups.missing])
        if group.kind is EpochKind.NONE and self.interruptions.number == 0:
            return f"loading for {waited_s:.1f} s: {why}"
        if group.kind is EpochKind.NONE or self._is_broken:
            return f"re-forming for {waited_s:.1f} s (epoch {group.epoch}): {why}"
        for worker in group.engaged:
            if worker.still_s > self._timings.stall_s:
                return f"{worker.label} has made no progress for {worker.still_s:.1f} s"
        return ""

    def loading(self) -> str:
        """Returns which workers still load weights, and their progress; empty if none does."""
        loads = [(w.slot.name, w.status.load) for w in (self.group.workers if self.group else ())]
        return ", ".join(f"{name} {load.told}" for name, load in loads if load and not load.is_over)

    def start_report(self) -> StartReport | None:
        """Returns how far the workers are; None where the reason says more: there is no room for
        them, a node is missing, something has failed."""
        if self._fatal is not None or self.interruptions.has_trouble:
            return None
        if self.group is None:
            return None if self._waiting_for() else StartReport(num_workers=0, num_slots=0)
        workers = self.group.workers
        if workers.placement_groups.missing:
            return None
        loads = [(worker.slot.name, worker.status.load) for worker in workers]
        return StartReport(
            num_workers=len(loads),
            num_slots=len(workers.slots),
            loads=tuple(
                RankLoad(rank=name, bytes_done=load.bytes_done, bytes_total=load.bytes_total)
                for name, load in loads
                if load is not None
            ),
        )

    async def check(self) -> None:
        """Waits for the first start; raises when this pipeline will not be ready again."""
        while not self._supervising.done() and not self.has_started:
            await asyncio.wait({self._supervising}, timeout=self._timings.worker_heartbeat_s)
        if self._supervising.done() and not self._stopping.is_set():
            raise self._fatal or self.interruptions.trouble

    async def load_head(self, folder: str, *, head_key: str, pause_s: float) -> HeadReport:
        """Loads another exit head. Raises CheckpointError or ConfigError if it does not fit; then
        the old one stays."""
        deadline_s = time.monotonic() + pause_s
        while why := self.why_unavailable():
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"cannot take {folder}: pipeline {self._pipeline} is unavailable after "
                    f"{pause_s:g} s: {why}"
                )
            await asyncio.sleep(self._timings.worker_heartbeat_s)
        group = self.require_group()
        if group.is_degraded:
            raise EngineError(f"cannot take {folder} now: degraded: {DEGRADED}; try again")
        try:
            async with asyncio.timeout(self._timings.load_s):
                report = await group.load_head(folder)
        except TimeoutError as error:
            raise EngineError(
                f"cannot take {folder}: pipeline {self._pipeline} has not loaded it within "
                f"{self._timings.load_s:g} s"
            ) from error
        self.promotion = Promotion(in_place_of=head_key, head=folder, taken_unix_s=time.time())
        return report

    async def stop(self) -> None:
        """Releases the workers and their placement groups: this pipeline is not wanted any more."""
        self._stopping.set()
        if self.group is None:  # still waiting for room
            self._supervising.cancel()
        await asyncio.gather(self._supervising, return_exceptions=True)

    async def _supervise(self, make_group: Callable[[], Awaitable[WorkerGroup]]) -> None:
        """Runs until the pipeline is released, given up, or claimed by another supervisor."""
        try:
            group = self.group = await make_group()
            self.interruptions.since_s = self._loading_since_s = time.monotonic()
            if group.kind is not EpochKind.NONE:  # claimed
                await self._mark_ready(group)
            if group.claimed_trouble is not None:
                self._note_trouble(group.claimed_trouble)
            while (action := next_action(self._state(group))) not in _LAST_ACTIONS:
                await self._unless_stopped(self._act(group, action))
            if action is Action.GIVE_UP:
                logger.error("given up: pipeline=%s: %s", self._pipeline, self._fatal)
            await group.stop()
        except LeaseLost as error:
            logger.warning("claimed by another supervisor: pipeline=%s", self._pipeline)
            self._fatal = error
        except Exception as error:
            bug = EngineError(f"pipeline {self._pipeline} is given up by a bug: {error!r}")
            self._fatal = error if isinstance(error, EesdError) else bug
            is_bug = self._fatal is bug
            logger.error("given up: pipeline=%s: %s", self._pipeline, error, exc_info=is_bug)
            if self.group is not None:
                await self.group.stop()
        await self._publish_status()

    def _state(self, group: WorkerGroup) -> SupervisedState:
        return SupervisedState(
            is_deployed=not self._stopping.is_set(),
            is_hopeless=self._fatal is not None,
            epoch=group.kind,
            is_broken=self._is_broken,
            is_head_unloadable=self._is_head_unloadable,
            must_wait=self._backoff.left_s > 0,
            can_fall_back=group.can_fall_back and not self._has_fallback_failed,
            is_draft_ready=group.is_draft_ready,
        )

    async def _unless_stopped(self, acting: Coroutine[Any, Any, None]) -> None:
        """A long action ends when this pipeline is taken down."""
        tasks = (asyncio.ensure_future(acting), asyncio.ensure_future(self._stopping.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _act(self, group: WorkerGroup, action: Action) -> None:
        match action:
            case Action.END_EPOCH:
                await self._end_epoch(group)
            case Action.RESET_HEAD:
                await group.reset_head()
                self.promotion, self._is_head_unloadable = None, False
            case Action.WAIT:
                await asyncio.sleep(self._backoff.left_s)
            case Action.START_DEGRADED:
                await self._start_degraded(group)
            case Action.START_FULL:
                await self._start_full(group)
            case Action.RESTORE_DRAFT:
                await self._until_broken(group, self._restore_draft(group))
            case Action.FAIL_BACK:
                await self._fail_back(group)
            case Action.WATCH:
                await self._until_broken(group, asyncio.Event().wait())

    async def _start_full(self, group: WorkerGroup) -> None:
        began_s = time.monotonic()
        left_s = self._timings.load_s - (began_s - self._loading_since_s)
        try:
            await group.start_epoch(timeout_s=max(1.0, left_s))
        except ConfigError as error:
            if not group.has_other_head:
                self._fatal = error
                return
            # The promoted head's folder is gone or has changed.
            logger.error("back to the configured head: pipeline=%s error=%s", self._pipeline, error)
            self._is_head_unloadable = True
        except LeaseLost:
            raise
        except EesdError as error:
            await self._not_started(group, error)
        else:
            took_s = time.monotonic() - began_s
            group.workers.start_s = max(group.workers.start_s or 0.0, took_s)
            self._has_fallback_failed = False
            await self._mark_ready(group)

    async def _start_degraded(self, group: WorkerGroup) -> None:
        try:
            await group.start_degraded_epoch(timeout_s=self._timings.load_s / 2)
        except LeaseLost:
            raise
        except EesdError as error:
            logger.warning("no fallback: pipeline=%s error=%s", self._pipeline, error)
            self._has_fallback_failed = True
            await group.end_epoch(error)
        else:
            logger.warning("degraded: pipeline=%s: %s", self._pipeline, DEGRADED)
            await self._mark_ready(group)

    async def _not_started(self, group: WorkerGroup, error: EesdError) -> None:
        logger.warning("not formed: pipeline=%s error=%s", self._pipeline, error)
        self.interruptions.trouble = error
        if group.workers.placement_groups.missing:  # waiting for a node is not loading
            self._loading_since_s = time.monotonic()
        elif time.monotonic() - self._loading_since_s > self._timings.load_s:
            self._fatal = EngineError(
                f"pipeline {self._pipeline} is given up: it was not formed within "
                f"{self._timings.load_s:g} s, the last time: {error}"
            )
            return
        await group.end_epoch(error)
        self._backoff.failed()

    async def _restore_draft(self, group: WorkerGroup) -> None:
        try:
            await group.restore_draft(timeout_s=self._timings.load_s)
        except LeaseLost:
            raise
        except EesdError as error:
            if isinstance(error, ConfigError) and group.has_other_head:
                self._is_head_unloadable = True
                self.interruptions.trouble, self._is_broken = error, True
                return
            logger.warning("still degraded: pipeline=%s error=%s", self._pipeline, error)
            self._backoff.failed()
            await asyncio.sleep(self._backoff.pause_s)
        else:
            self._backoff.worked()

    async def _fail_back(self, group: WorkerGroup) -> None:
        """Ends the degraded epoch in good order; that is no interruption."""
        logger.info("failing back: pipeline=%s epoch=%d", self._pipeline, group.epoch)
        reason = "it is failing back to the draft stage that is back"
        self._become_unavailable()
        self.interruptions.trouble, self._is_broken = EngineError(reason), True
        await self._publish_status()
        migrated = Migrated(by="", to=None, reason=reason)
        await group.send_streams_on(migrated)
        await group.end_epoch(migrated)
        self._is_broken = False

    async def _until_broken(self, group: WorkerGroup, work: Awaitable[object]) -> None:
        """Runs the work until it is done or the epoch is broken; the latter is noted."""
        trouble = asyncio.ensure_future(group.trouble())
        working = asyncio.ensure_future(work)
        stalling = asyncio.ensure_future(self._publish_stalls())
        waiting: set[asyncio.Future[Any]] = {trouble, working}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if trouble.done():
                self._note_trouble(trouble.result())
            else:
                working.result()
        finally:
            for task in (*waiting, stalling):
                task.cancel()
            await asyncio.gather(*waiting, stalling, return_exceptions=True)

    async def _publish_stalls(self) -> None:
        """Tells the router at once when progress stops, and when it is back."""
        was_ready = self.is_ready
        while True:
            await asyncio.sleep(self._timings.worker_heartbeat_s)
            if self.is_ready != was_ready:
                was_ready = self.is_ready
                await self._publish_status()

    def _note_trouble(self, trouble: EesdError) -> None:
        if isinstance(trouble, LeaseLost):
            raise trouble
        logger.warning("interrupted: pipeline=%s error=%s", self._pipeline, trouble)
        self.interruptions.note(trouble)
        self._is_broken = True

    async def _end_epoch(self, group: WorkerGroup) -> None:
        """Ends a broken epoch, so that a new one can be started."""
        # The last heartbeat may be older than the epoch.
        statuses = [m.status for m in group.engaged[:1] if m.status.epoch == group.epoch]
        trouble = self.interruptions.trouble
        # A lost peer or an unreadable file is no crash.
        is_crash = not isinstance(trouble, (PeerLost, ConfigError))
        had_requests = is_crash or any(status.num_live > 0 for status in statuses)
        has_worked = any(status.has_computed for status in statuses)
        self._become_unavailable()
        self.interruptions.number += 1
        await self._publish_status()
        await group.end_epoch(trouble, is_crash=is_crash)
        self._is_broken = False
        self.interruptions.count_fruitless(had_requests=had_requests, has_worked=has_worked)
        if (number := self.interruptions.num_fruitless) > self._max_interruptions:
            self._fatal = EngineError(
                f"pipeline {self._pipeline} is given up: it broke {number} times in a row without "
                f"a token in between, the last time: {trouble}"
            )

    def _become_unavailable(self) -> None:
        self.interruptions.start_waiting()
        self._loading_since_s = time.monotonic()

    async def _mark_ready(self, group: WorkerGroup) -> None:
        self.has_started = True
        unavailable_s = self.interruptions.since_s
        self.interruptions.end_waiting(is_degraded=group.is_degraded)
        if self.interruptions.number:
            logger.info(
                "recovered: pipeline=%s epoch=%d spawned_s=%.2f ready_s=%.2f after=%s",
                self._pipeline,
                group.epoch,
                group.spawned_s - unavailable_s,
                self.interruptions.recovery_s,
                self.interruptions.trouble,
            )
        self._backoff.worked()
        logger.info("ready: pipeline=%s epoch=%d", self._pipeline, group.epoch)
        await self._publish_status()
