"""The actor of a verify rank, or of a draft rank other than 0.

Holds weights and KV pages, and makes no decisions. It joins the epochs it is told to join and runs
their rounds in a thread until the channel is closed, a peer is lost or it is told to leave.

A verify rank may hold a fallback: an object with a draft rank's part of the target that drafts
nothing. It has the interface of an actor, runs in the same process and is called through this
actor.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, EngineError
from eesd_dist.telemetry.span_records import SpanRecord
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.epochs.loop import ABORT_WAIT_S, LoopThread
from eesd_dist.workers.messages import (
    Epoch,
    LoadedRank,
    LoopEnd,
    StageName,
    TelemetryOptions,
    Tenancy,
    WorkerStatus,
)
from eesd_dist.workers.process import prepare_process, tracing_of
from eesd_dist.workers.roles import DraftFollower, RankEpoch, RankWorker, StageFactory
from eesd_dist.workers.tenure import Tenure
from eesd_dist.workers.worker_actor import WorkerActor

logger = logging.getLogger(__name__)


class _RunningEpoch:
    def __init__(self, rank_epoch: RankEpoch, *, epoch: Epoch, name: str) -> None:
        self._rank_epoch = rank_epoch
        self.epoch = epoch
        self.thread = LoopThread(rank_epoch.run, name=name)

    def status(self) -> WorkerStatus:
        number = self._rank_epoch.number()
        return WorkerStatus(
            epoch=self.epoch.number, progress=number or 0, is_busy=number is not None
        )

    async def stop(self) -> bool:
        self._rank_epoch.abort()
        return await self.thread.ended_within(ABORT_WAIT_S)


class RankActor(WorkerActor):
    """A verify rank, or a draft rank other than 0."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        stage: StageName,
        rank: int,
        stages: StageFactory,
        telemetry: TelemetryOptions,
        tenure: Callable[[], Tenure] | None = None,
    ) -> None:
        """`tenure` makes its lease; a fallback has none, and ends with its host."""
        prepare_process(telemetry.log_format)
        lease = None if tenure is None else tenure()
        self._tracing = tracing_of(telemetry, process=name)
        self._worker_of = partial(_worker_of, stages, config, self._tracing, stage=stage)
        self._worker, self._draft = self._worker_of(rank=rank)
        super().__init__(name=name, role=self._worker, tenure=lease)
        self._running: _RunningEpoch | None = None
        """None between epochs."""
        has_fallbacks = stage == "verify" and config.parallel.fallback
        self._num_fallbacks = config.parallel.draft_tensor_parallel_size if has_fallbacks else 0
        self._fallback_of = partial(_fallback, config, stages=stages, telemetry=telemetry)
        self._fallback = self._make_fallback(rank)

    async def take_slot(self, slot: str, rank: int | None) -> None:
        """Builds what this rank needs, without weights; they are loaded by `join`."""
        assert rank is not None, "a drafting actor has a spare of its own kind"
        await super().take_slot(slot, rank)
        self._worker, self._draft = self._worker_of(rank=rank)
        self._role = self._worker
        self._fallback = self._make_fallback(rank)

    def _make_fallback(self, rank: int) -> "DraftActor | RankActor | None":
        """Returns the fallback for the draft rank of the same number; None where there is none."""
        return self._fallback_of(self._name, rank) if rank < self._num_fallbacks else None

    async def tenancy(self) -> Tenancy:
        """Returns what another supervisor needs to know to claim this worker."""
        running = self._running
        return self._leased().tenancy(
            epoch=0 if running is None else running.epoch.number,
            newest_epoch=self._joining.newest,
            num_pages=self._joining.num_pages,
            is_degraded=running is not None and running.epoch.is_degraded,
        )

    def _in_epoch(self) -> WorkerStatus | None:
        return None if self._running is None else self._running.status()

    async def prepare(self) -> LoadedRank:
        """Loads the weights before there is an epoch to join, unless they are loaded. Returns what
        the ranks of a pipeline have to agree on."""
        return await asyncio.to_thread(self._worker.prepare)

    async def fallback(self, method: str, *args: object) -> object:
        """Calls a method of the fallback in this process and returns its result."""
        answer: object = await getattr(self._require_fallback(), method)(*args)
        return answer

    def _require_fallback(self) -> "DraftActor | RankActor":
        if self._fallback is None:
            raise EngineError(f"{self._name} has no fallback: set engine.parallel.fallback")
        return self._fallback

    async def join(self, epoch: Epoch) -> None:
        rank_epoch = await self._joining.enter(epoch, lambda: self._worker.join(epoch))
        self._running = _RunningEpoch(rank_epoch, epoch=epoch, name=f"loop of {self._name}")
        logger.info("joined: rank=%s epoch=%d", self._name, epoch.number)

    def _draft_follower(self) -> DraftFollower:
        if self._draft is None:
            raise EngineError(f"{self._name} holds no part of the draft stage: ask a draft rank")
        return self._draft

    async def load_head(self, folder: str) -> str:
        """Reads a draft rank's part of another exit head, and keeps it until a command of the
        drafting actor switches to it. Returns the head's digest.

        Raises CheckpointError or ConfigError when the head does not fit.
        """
        return await asyncio.to_thread(self._draft_follower().load_head, folder)

    async def ended(self) -> LoopEnd:
        running = self._running
        if running is None:
            return LoopEnd(error=None)
        return await running.thread.end()

    async def leave(self, trouble: EesdError | None = None, is_crash: bool = False) -> bool:
        """Leaves the epoch. Returns False when the loop or a load cannot be stopped."""
        del trouble, is_crash  # streams are the drafting actor's
        running = self._running
        self._running = None
        self._worker.disconnect()
        has_left = await self._joining.leave()
        return has_left and (running is None or await running.stop())

    async def spans(self, trace_ids: Collection[str]) -> tuple[SpanRecord, ...]:
        """Returns the spans of these traces that are kept here."""
        return self._tracing.spans(trace_ids)

    async def flush(self) -> None:
        """Sends pending spans; call before ending the process."""
        await asyncio.to_thread(self._tracing.flush)


def _worker_of(
    stages: StageFactory, config: EngineConfig, tracing: Tracing, *, stage: StageName, rank: int
) -> tuple[RankWorker, DraftFollower | None]:
    """Returns the rank's role, and the same object as a DraftFollower where it is one."""
    if stage == "draft":
        follower = stages.draft_follower(config, tracing, rank=rank)
        return follower, follower
    return stages.verify_worker(config, tracing, rank=rank), None


def _fallback(
    config: EngineConfig,
    host: str,
    rank: int,
    *,
    stages: StageFactory,
    telemetry: TelemetryOptions,
) -> DraftActor | RankActor:
    """Builds a fallback. There are as many as draft ranks, so that sums have the same order and
    the same bits."""
    plain = config.model_copy(
        update={
            "speculation": config.speculation.model_copy(update={"max_draft_tokens": 0}),
            # On one device nothing overlaps, and kernels of two groups would block each other.
            "scheduler": config.scheduler.model_copy(update={"overlap": False}),
            "parallel": config.parallel.model_copy(update={"fallback": False}),
        }
    )
    name = f"fallback in {host}"
    if rank == 0:
        return DraftActor(plain, name=name, stages=stages, telemetry=telemetry)
    return RankActor(plain, name=name, stage="draft", rank=rank, stages=stages, telemetry=telemetry)
