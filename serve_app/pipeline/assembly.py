"""Assembly of a pipeline's workers: claimed from a dead supervisor, or placed."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.ray_compat import has_autoscaler
from eesd_dist.errors import EngineError
from eesd_dist.workers.messages import PlacementMode
from eesd_dist.workers.roles import StageFactory
from eesd_dist.workers.tenure import workers_named
from serve_app.config import ServiceConfig
from serve_app.pipeline.claim import Orphans, claim, digest_of, end_workers
from serve_app.pipeline.held_room import waiting_for_room
from serve_app.pipeline.placement.gpu_plan import GpuPlan, gpu_plan
from serve_app.pipeline.placement.placement_groups import (
    PlacementGroups,
    nodes_now,
    placement_groups_for,
    present_placement_groups,
    remove_abandoned_groups,
)
from serve_app.pipeline.placement.rank_slots import (
    LEADER,
    RankSlot,
    groups_of,
    rank_slots,
    relation_of,
    require_room,
)
from serve_app.pipeline.timings import timings_of
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import Workers, WorkerSpec
from serve_app.router.calls import AskRouter, pipelines_of

logger = logging.getLogger(__name__)

_TELL_S = 10.0
_LOOK_S = 2.0
"""Interval of looks at the cluster's GPUs during the wait for room."""


class Assembly:
    """Makes the worker group of one pipeline."""

    def __init__(
        self,
        config: ServiceConfig,
        stages: StageFactory,
        *,
        pipeline: str,
        owner: str,
        router: Any,
        orphans: Orphans | None,
        head: str | None,
    ) -> None:
        """`owner` is this supervisor's actor id; `orphans` are claimed, unless another supervisor
        is faster. `head` is the promoted exit head; None: that of the configuration."""
        self._config = config
        self._router = router
        self._orphans = orphans
        self._head = head
        self.waiting_for = ""
        """Which bundle lacks what, and where; empty while nothing is waited for."""
        self._name = f"{config.app_name}/{pipeline}"
        self._spec = WorkerSpec(
            app=config.app_name,
            namespace=config.router.namespace,
            pipeline=pipeline,
            digest=digest_of(config),
            owner=owner,
            node_id=ray.get_runtime_context().get_node_id(),
            engine=config.engine,
            stages=stages,
            telemetry=config.telemetry_options,
            ask_router=AskRouter(router),
            timings=timings_of(config),
        )

    async def __call__(self) -> WorkerGroup:
        """Waits for room. Raises ConfigError for a bundle that can never be placed, LeaseLost when
        another supervisor has claimed the workers of this pipeline."""
        if self._orphans is not None:
            gpus = await asyncio.to_thread(_gpu_plan, self._config)
            for tenancy in self._orphans.workers.values():  # GPUs may have come or gone since
                gpus = replace(gpus, mode=tenancy.identity.mode)
            slots = _slots(self._config, gpus)
            try:
                groups = present_placement_groups(
                    slots,
                    placement=self._config.placement,
                    name=self._name,
                    owner=self._spec.owner,
                )
            except EngineError as error:  # no worker could be replaced
                names = (*self._orphans.workers, *self._orphans.silent)
                logger.warning("not claimed: pipeline=%s error=%s", self._spec.pipeline, error)
                await asyncio.to_thread(end_workers, self._config, self._spec.pipeline, names)
            else:
                group = await claim(self._orphans, Workers(groups, slots, spec=self._spec))
                slots_of = {t.identity.slot for t in self._orphans.workers.values()}
                if self._head is not None and LEADER not in slots_of:  # it cannot say which it has
                    group.set_head(self._head)
                logger.info("claimed: pipeline=%s epoch=%d", self._spec.pipeline, group.epoch)
                return group
        await self._sweep()
        telling = asyncio.ensure_future(self._tell_waiting())
        try:
            slots, groups = await self._placed()
        finally:
            telling.cancel()
            self.waiting_for = ""
        group = WorkerGroup(Workers(groups, slots, spec=self._spec))
        if self._head is not None:
            group.set_head(self._head)
        return group

    async def _sweep(self) -> None:
        """Frees room that a supervisor left behind which had no worker yet."""
        app, namespace = self._spec.app, self._spec.namespace
        try:
            _, listed = await pipelines_of(self._router, app=app, membership_id="", wait_s=0.0)
            workers = await asyncio.to_thread(workers_named, f"{app}/", namespace=namespace)
            supervised = {pipeline.report.pipeline_id for pipeline in listed}
            present = supervised.union(workers.values(), {self._spec.pipeline})
            await asyncio.to_thread(remove_abandoned_groups, app, present=present)
        except (EngineError, RayError, ValueError) as error:
            logger.info("not swept: pipeline=%s error=%s", self._spec.pipeline, error)

    async def _tell_waiting(self) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            why = self.waiting_for
            with suppress(RayError):
                why += await waiting_for_room(self._spec.app, namespace=self._spec.namespace)
            if why:
                logger.warning("waiting for room: pipeline=%s %s", self._spec.pipeline, why)

    def _wait(self, why: str) -> None:
        self.waiting_for = why

    async def _placed(self) -> tuple[tuple[RankSlot, ...], PlacementGroups]:
        """Nodes may join or leave during the wait for room: if that changes the mode or the GPUs
        per rank, the groups are placed again."""
        config = self._config
        gpus = await asyncio.to_thread(_gpu_plan, config)
        while True:
            slots = _slots(config, gpus)
            placing = asyncio.ensure_future(
                placement_groups_for(
                    slots,
                    placement=config.placement,
                    name=self._name,
                    owner=self._spec.owner,
                    on_wait=self._wait,
                )
            )
            watching = asyncio.ensure_future(_other_plan(config, gpus))
            try:
                await asyncio.wait({placing, watching}, return_when=asyncio.FIRST_COMPLETED)
                if placing.done():
                    groups = placing.result()
                    plan = await asyncio.to_thread(_gpu_plan, config)
                    if plan == gpus:
                        self._log_mode(plan.mode)
                        return slots, groups
                    groups.remove()
                else:
                    plan = watching.result()
            finally:
                for task in (placing, watching):
                    task.cancel()
                await asyncio.gather(placing, watching, return_exceptions=True)
            logger.info("placed again: pipeline=%s %s, was %s", self._name, plan, gpus)
            gpus = plan

    def _log_mode(self, mode: PlacementMode) -> None:
        if mode == "shared" and self._config.placement.mode is None:
            logger.warning(
                "placement.mode: pipeline=%s shared: the cluster has a GPU too few for a drafting "
                "actor of its own, so that it also holds verify rank 0, also if GPUs join later; "
                "placement.mode states which is meant",
                self._name,
            )


async def _other_plan(config: ServiceConfig, plan: GpuPlan) -> GpuPlan:
    """Waits until the cluster's GPUs suggest another plan; returns that."""
    while True:
        await asyncio.sleep(_LOOK_S)
        with suppress(RayError):  # its head is away
            if (other := await asyncio.to_thread(_gpu_plan, config)) != plan:
                return other


def placement_mode(config: ServiceConfig) -> PlacementMode:
    """Returns the mode that a pipeline gets in the connected cluster."""
    return _gpu_plan(config).mode


def require_local_room(config: ServiceConfig) -> None:
    """Raises ConfigError if the present nodes, when nothing else runs on them, have no room for a
    pipeline: for a Ray that no node will join."""
    slots = _slots(config, _gpu_plan(config))
    nodes = nodes_now()
    require_room(groups_of(slots, config.placement, nodes), relation_of(config.placement), nodes)


def _slots(config: ServiceConfig, gpus: GpuPlan) -> tuple[RankSlot, ...]:
    parallel, spares = config.engine.parallel, config.recovery.spares
    return rank_slots(
        config.placement,
        num_verify_ranks=parallel.verify_tensor_parallel_size,
        num_draft_ranks=parallel.draft_tensor_parallel_size,
        gpus_per_rank=gpus.gpus_per_rank,
        mode=gpus.mode,
        num_draft_spares=spares.num_draft,
        num_verify_spares=spares.num_verify,
    )


def _gpu_plan(config: ServiceConfig) -> GpuPlan:
    device = config.engine.model.device
    return gpu_plan(
        config.placement,
        config.engine.parallel,
        num_gpus=0.0 if device == "cpu" else ray.cluster_resources().get("GPU", 0.0),
        needs_gpu=device == "cuda",
        may_grow=has_autoscaler,
    )
