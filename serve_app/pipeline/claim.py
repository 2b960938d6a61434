"""Finds the workers of a dead supervisor and claims them, so that nothing is loaded again.

A new replica looks for orphans: workers of its application that a dead supervisor has left. It
takes over those with the same configuration and kills the others, which hold GPUs for nothing.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group

from cluster.ray_compat import is_actor_dead
from eesd_dist.errors import EesdError, LeaseLost, PeerLost
from eesd_dist.workers.messages import Lease, Tenancy
from eesd_dist.workers.tenure import pipeline_prefix, placement_groups_named, workers_named
from serve_app.config import ServiceConfig
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.placement.rank_slots import LEADER
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import Workers

logger = logging.getLogger(__name__)

_ANSWER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphans:
    """The workers that a dead supervisor has left, by Ray name."""

    pipeline: str
    workers: Mapping[str, Tenancy]
    silent: tuple[str, ...] = ()
    """Names of the workers that did not answer: frozen, or started a moment ago."""


def digest_of(config: ServiceConfig) -> str:
    """Returns the digest of what workers are started with."""
    content = {
        "engine": config.engine.model_dump(mode="json"),
        "placement": config.placement.model_dump(mode="json"),
        "spares": config.recovery.spares.model_dump(mode="json"),
        "recorder": config.recorder.model_dump(mode="json"),
        "telemetry": config.telemetry.model_dump(mode="json"),
        "weights": _weights_of(config),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _weights_of(config: ServiceConfig) -> list[tuple[str, int, int]]:
    """Returns name, size and time of each weight file as this node sees it; none where the model's
    folder is on the workers' nodes only."""
    folders = [config.engine.model.path, config.engine.model.head]
    return [
        (str(file), (stat := file.stat()).st_size, stat.st_mtime_ns)
        for folder in folders
        if folder is not None
        for file in sorted(folder.rglob("*.safetensors"))
    ]


async def orphans_of(config: ServiceConfig, lease: Lease) -> Orphans | None:
    """Returns workers of a dead supervisor, the first of them claimed already, so that no other
    supervisor takes them; None if there are none. Ends those of other configurations."""
    namespace = config.router.namespace
    worker_pipelines = await asyncio.to_thread(
        workers_named, f"{config.app_name}/", namespace=namespace
    )
    tenancies = await asyncio.gather(
        *[tenancy_of(name, namespace=namespace) for name in worker_pipelines]
    )
    by_pipeline: dict[str, dict[str, Tenancy]] = {}
    silent: dict[str, list[str]] = {}
    for (name, pipeline), tenancy in zip(worker_pipelines.items(), tenancies, strict=True):
        if tenancy is None:
            silent.setdefault(pipeline, []).append(name)
        else:
            by_pipeline.setdefault(pipeline, {})[name] = tenancy
    digest = digest_of(config)
    for pipeline, workers in by_pipeline.items():
        if not await asyncio.to_thread(_are_dead, {t.owner for t in workers.values()}):
            continue
        if any(t.identity.digest != digest for t in workers.values()):
            logger.warning("workers of another configuration ended: pipeline=%s", pipeline)
            names = [*workers, *silent.get(pipeline, ())]
            await asyncio.to_thread(end_workers, config, pipeline, names)
        elif await _is_first(config, workers, lease):
            left = tuple(silent.get(pipeline, ()))
            return Orphans(pipeline=pipeline, workers=workers, silent=left)
    return None


async def _is_first(config: ServiceConfig, workers: Mapping[str, Tenancy], lease: Lease) -> bool:
    """Claims the worker that every supervisor would claim first; returns whether this one has."""
    name = min(workers)
    try:
        handle = ray.get_actor(name, namespace=config.router.namespace)
        async with asyncio.timeout(_ANSWER_S):
            await handle.claim.remote(lease, workers[name].owner)
    except (TimeoutError, ValueError, RayError) as error:
        logger.info("not claimed: worker=%s error=%r", name, error)
        return False
    return True


async def claim(orphans: Orphans, workers: Workers) -> WorkerGroup:
    """Takes the workers over, with the epoch they are in. A worker that does not answer is killed:
    it holds the bundle of its slot.

    Raises LeaseLost when another supervisor has claimed one of them.
    """
    for name, tenancy in orphans.workers.items():
        try:
            await workers.claim(name, tenancy)
        except LeaseLost:
            raise
        except (EesdError, TimeoutError, ValueError) as error:
            logger.warning("not claimed: worker=%s error=%r", name, error)
            await asyncio.to_thread(_kill, name, workers.spec.namespace)
    for name in orphans.silent:
        logger.warning("ended, since it does not answer: worker=%s", name)
        await asyncio.to_thread(_kill, name, workers.spec.namespace)
    group = WorkerGroup(workers)
    tenancies = orphans.workers.values()
    configured = workers.spec.engine.model.head
    heads = {t.head for t in tenancies if t.identity.slot == LEADER}
    for head in heads - {"", str(configured)}:
        group.set_head(head)
    starts = [t.start_s for t in tenancies if t.start_s is not None]
    workers.start_s = max(starts, default=None)
    if num_pages := max(t.num_pages for t in tenancies):
        group.keep_pages(num_pages)
    newest = max(t.newest_epoch for t in tenancies)
    if not any(t.epoch for t in tenancies):
        group.epoch = newest  # they are in none now, and the next one gets a higher number
    else:
        is_degraded = any(t.is_degraded for t in tenancies)
        kind = EpochKind.DEGRADED if is_degraded else EpochKind.FULL
        group.adopt(epoch=newest, kind=kind, trouble=_why_broken(workers, tenancies, epoch=newest))
    return group


def _why_broken(
    workers: Workers, tenancies: Collection[Tenancy], *, epoch: int
) -> EesdError | None:
    """Returns why the epoch of claimed workers cannot go on. In a degraded epoch, of which verify
    ranks know, draft ranks are in none."""
    by_slot = {t.identity.slot: t for t in tenancies}
    is_degraded = any(t.is_degraded for t in tenancies)
    for slot in workers.slots:
        if is_degraded and slot.stage == "draft":
            continue
        tenancy = by_slot.get(slot.name)
        if tenancy is None or workers.is_empty(slot) or tenancy.epoch != epoch:
            reason = "its supervisor died during a change of the epoch"
            return PeerLost(peer=slot.name, operation="claim", reason=reason)
    return None


async def tenancy_of(name: str, *, namespace: str) -> Tenancy | None:
    """Returns what a worker says of itself; None for no answer, and for actors of other kinds."""
    try:
        handle = await asyncio.to_thread(ray.get_actor, name, namespace=namespace)
        async with asyncio.timeout(_ANSWER_S):
            tenancy: Tenancy = await handle.tenancy.remote()
    except (TimeoutError, ValueError, AttributeError, RayError) as error:
        logger.info("no answer: worker=%s error=%r", name, error)
        return None
    return tenancy


def _are_dead(owners: set[str]) -> bool:
    return all(is_actor_dead(owner) for owner in owners)


def end_workers(config: ServiceConfig, pipeline: str, names: Collection[str]) -> None:
    """Kills workers of a dead supervisor, and removes their placement groups."""
    for name in names:
        _kill(name, config.router.namespace)
    for group in placement_groups_named(pipeline_prefix(config.app_name, pipeline)).values():
        remove_placement_group(group)


def _kill(name: str, namespace: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=namespace))
    except ValueError:  # it has gone by itself
        return
