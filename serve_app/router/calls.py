"""Calls of the router, each with a deadline."""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray

from eesd_dist.errors import PROCESS_DIED, EngineError, PeerLost
from eesd_dist.routing.directory import Listed, PipelineId, PipelineReport, Promotion
from eesd_dist.routing.fleet.departure import FleetState
from eesd_dist.routing.fleet.size import FleetTargets
from eesd_dist.routing.quotas import Quota, Standing
from eesd_dist.workers.messages import RouterAdvice, RouterNews
from serve_app.config import ServiceConfig
from serve_app.router.actor import router_handle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AskRouter:
    """Calls the router for a drafting actor."""

    handle: Any

    async def __call__(self, update: RouterNews) -> RouterAdvice:
        advice: RouterAdvice = await self.handle.advise.remote(update)
        return advice


async def promotion_of(handle: Any, *, head_key: str, timeout_s: float = 10.0) -> Promotion | None:
    """Returns the promoted head that a new pipeline drafts with; None for the configured one."""
    try:
        async with asyncio.timeout(timeout_s):
            promotion: Promotion | None = await handle.promotion.remote(head_key)
    except (TimeoutError, ray.exceptions.RayError) as error:
        logger.warning("promoted head unknown, no answer from the router: error=%r", error)
        return None
    return promotion


async def _answer(method: Any, *arguments: object, timeout_s: float, failure: str) -> Any:
    """Returns the answer of the router's method. Raises EngineError without one."""
    try:
        async with asyncio.timeout(timeout_s):
            return await method.remote(*arguments)
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise EngineError(f"the router did not {failure}: {error!r}") from error


async def size_of_fleet(
    handle: Any, *, app: str, targets: FleetTargets, count: int, timeout_s: float = 2.0
) -> int:
    """Returns how many pipelines a service should have. Raises EngineError without an answer."""
    size: int = await _answer(
        *(handle.size_fleet, app, targets, count), timeout_s=timeout_s, failure="size the fleet"
    )
    return size


async def fleet_of(handle: Any, *, app: str, timeout_s: float = 1.0) -> FleetState | None:
    """Returns the state of a service's autoscaling; None where there is none. Raises EngineError
    without an answer."""
    state: FleetState | None = await _answer(
        handle.fleet, app, timeout_s=timeout_s, failure="describe the fleet"
    )
    return state


async def ingress_pages_of(handle: Any, *, app: str, timeout_s: float = 1.0) -> dict[str, bytes]:
    """Returns the latest metrics of each ingress of a service. Raises EngineError without an
    answer."""
    pages: dict[str, bytes] = await _answer(
        handle.ingress_pages, app, timeout_s=timeout_s, failure="return the metrics"
    )
    return pages


async def pipelines_of(
    handle: Any,
    *,
    app: str,
    membership_id: str,
    wait_s: float,
    timeout_s: float = 1.0,
    ingress: str = "",
    num_waiting: int = 0,
    targets: FleetTargets | None = None,
) -> tuple[str, tuple[Listed, ...]]:
    """Returns the directory's reports of a service, and the number of its membership, as soon as
    it is not `membership_id` or `wait_s` is over. Raises EngineError without an answer.

    Tells the router how many requests wait at this ingress while no pipeline is ready, and which
    targets of autoscaling it was given.

    A restarted router lists no pipelines before their next heartbeats.
    """
    answer: tuple[str, tuple[Listed, ...]] = await _answer(
        *(handle.pipelines, app, membership_id, wait_s, ingress, num_waiting, targets),
        timeout_s=wait_s + timeout_s,
        failure="list the pipelines",
    )
    return answer


async def acquired(
    handle: Any,
    *,
    app: str,
    caller: str,
    quota: Quota,
    permit: str,
    ingress: str,
    timeout_s: float,
) -> Standing:
    """Asks the router for a permit. Raises EngineError without an answer."""
    calling = handle.acquire.remote(app, caller, quota, permit, ingress)
    return await _standing_of(calling, timeout_s=timeout_s)


async def reserved(
    handle: Any,
    *,
    app: str,
    caller: str,
    quota: Quota,
    permit: str,
    ingress: str,
    num_tokens: int,
    timeout_s: float,
) -> Standing:
    """Asks the router to reserve tokens. Raises EngineError without an answer."""
    calling = handle.reserve.remote(app, caller, quota, permit, ingress, num_tokens)
    return await _standing_of(calling, timeout_s=timeout_s)


async def _standing_of(calling: Any, *, timeout_s: float) -> Standing:
    try:
        async with asyncio.timeout(timeout_s):
            standing: Standing = await calling
    except ray.exceptions.TaskCancelledError:  # with the request that it is for
        raise
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise EngineError(f"the router does not keep the limits: {error!r}") from error
    return standing


async def find_peer_pipeline(
    handle: Any, *, app: str, excluded: Collection[PipelineId], timeout_s: float = 1.0
) -> PipelineReport | None:
    """Returns a ready pipeline that is not excluded; None if there is none, or no answer."""
    try:
        async with asyncio.timeout(timeout_s):
            peer: PipelineReport | None = await handle.choose.remote(app, tuple(excluded))
    except (TimeoutError, ray.exceptions.RayError) as error:
        logger.warning("no peer pipeline, no answer from the router: error=%r", error)
        return None
    return peer


async def beat(handle: Any, report: PipelineReport, *, timeout_s: float = 1.0) -> bool:
    """Sends one heartbeat; returns whether autoscaling wants this pipeline to leave.

    Raises PeerLost when the router's actor is dead, or not restarted yet, and has to be found again
    by its name; EngineError when it does not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            must_leave: bool = await handle.heartbeat.remote(report)
    except ray.exceptions.RayActorError as error:
        raise PeerLost(peer="router", operation="heartbeat", reason=PROCESS_DIED) from error
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise EngineError(f"the router did not take the heartbeat: {error!r}") from error
    return must_leave


async def found_again(handle: Any, config: ServiceConfig) -> Any:
    """Returns the router of this name, started if there is none; `handle` if neither works."""
    try:
        return await asyncio.to_thread(router_handle, config)
    except (ValueError, ray.exceptions.RayError) as error:
        logger.warning("router not found: error=%r", error)
        return handle
