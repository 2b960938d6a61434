"""A verify-rank actor: weights, KV pages and no opinion.

It joins the generations it is told to join and runs their rounds in a thread until the channel is
closed, a peer is lost or it is told to leave.
"""

import asyncio
import logging

from eesd_dist.actors.contracts import (
    Generation,
    LoopEnd,
    StagesFactory,
    TelemetryOptions,
    VerifyMember,
    Whereabouts,
)
from eesd_dist.actors.joining import Joining
from eesd_dist.actors.loop import LoopThread
from eesd_dist.actors.process import prepare_process, tracing_of, whereabouts
from eesd_dist.config import EngineConfig

logger = logging.getLogger(__name__)

_ABORT_WAIT_S = 5.0


class _Membership:
    def __init__(self, member: VerifyMember, *, name: str) -> None:
        self._member = member
        self.thread = LoopThread(member.run, name=name)

    async def stop(self) -> bool:
        self._member.abort()
        return await self.thread.ended_within(_ABORT_WAIT_S)


class VerifyActor:
    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        rank: int,
        stages: StagesFactory,
        telemetry: TelemetryOptions,
    ) -> None:
        prepare_process()
        self._name = name
        self._rank = rank
        self._tracing = tracing_of(telemetry, process=name)
        self._stages = stages(config, self._tracing)
        self._joining = Joining(name=name)
        self._membership: _Membership | None = None
        """None between generations."""

    async def whereabouts(self) -> Whereabouts:
        return whereabouts()

    async def forever(self) -> None:
        """Never returns: a pending call is how the pipeline learns that this process has died."""
        await asyncio.Event().wait()

    async def join(self, generation: Generation) -> None:
        member = await self._joining.enter(
            generation, lambda: self._stages.join_verify(generation, rank=self._rank)
        )
        self._membership = _Membership(member, name=f"loop of {self._name}")
        logger.info("joined: rank=%s generation=%d", self._name, generation.number)

    async def ended(self) -> LoopEnd:
        membership = self._membership
        if membership is None:
            return LoopEnd(error=None)
        return await membership.thread.end()

    async def leave(self) -> bool:
        """Ends the part in this generation; False when its loop or load cannot be stopped."""
        membership = self._membership
        self._membership = None
        has_left = await self._joining.leave()
        return has_left and (membership is None or await membership.stop())

    async def flush(self) -> None:
        """Sends spans that are still waiting; before this process is taken down."""
        await asyncio.to_thread(self._tracing.flush)
