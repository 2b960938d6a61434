"""Room in the cluster that workers without a supervisor still hold, and for how long.

A new pipeline may have to wait for it: without renewals such a worker exits when its lease ends.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ray.util.placement_group import placement_group_table

from eesd_dist.workers.messages import Tenancy
from eesd_dist.workers.tenure import LAST_WAIT_S, pipeline_prefix, workers_named
from serve_app.pipeline.claim import tenancy_of
from serve_app.pipeline.placement.rank_slots import Resources, summed

_UNRENEWED_S = 3.0
"""Longest pause between heartbeats; after it a worker has no supervisor, which is dead or
frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRoom:
    """Resources that are held by the workers of one pipeline without a supervisor."""

    app: str
    pipeline: str
    num_workers: int
    resources: Resources
    left_s: float
    """Longest time left; then the last of them has exited, unless a supervisor has claimed them."""

    def __str__(self) -> str:
        amounts = ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items())
        return (
            f"{self.num_workers} workers of pipeline {self.pipeline} (application {self.app}), "
            f"which have no supervisor, hold {amounts} by their lease for at most "
            f"{math.ceil(self.left_s)} s"
        )


async def waiting_for_room(app: str, *, namespace: str) -> str:
    """Returns which leases hold what an application waits for; empty if it does not wait for room,
    or if there are none."""
    is_waiting = await asyncio.to_thread(_is_waiting, app)
    held = await held_rooms(namespace) if is_waiting else ()
    return f"waiting for room: {'; '.join(map(str, held))}" if held else ""


async def held_rooms(namespace: str) -> tuple[HeldRoom, ...]:
    """Returns what is held by workers with a lease that was not renewed lately, by pipeline."""
    names = await asyncio.to_thread(workers_named, "", namespace=namespace)
    tenancies = await asyncio.gather(*[tenancy_of(name, namespace=namespace) for name in names])
    groups = await asyncio.to_thread(placement_group_table)
    return _held_by([t for t in tenancies if t is not None], tuple(groups.values()))


def _is_waiting(app: str) -> bool:
    """Returns whether a placement group of the application has no room."""
    return any(
        group["name"].startswith(f"{app}/") and group["state"] in ("PENDING", "RESCHEDULING")
        for group in placement_group_table().values()
    )


def _held_by(
    tenancies: Sequence[Tenancy], groups: Sequence[Mapping[str, Any]]
) -> tuple[HeldRoom, ...]:
    unrenewed = sorted(
        (t for t in tenancies if t.lease_s - t.left_s > _UNRENEWED_S), key=_pipeline_of
    )
    rooms = []
    for (app, pipeline), workers in groupby(unrenewed, key=_pipeline_of):
        leases = [worker.left_s for worker in workers]
        prefix = pipeline_prefix(app, pipeline)
        bundles = [
            bundle
            for group in groups
            if group["name"].startswith(prefix) and group["state"] != "REMOVED"
            for bundle in group["bundles"].values()
        ]
        rooms.append(
            HeldRoom(
                app=app,
                pipeline=pipeline,
                num_workers=len(leases),
                resources=summed(bundles),
                left_s=max(leases) + LAST_WAIT_S,
            )
        )
    return tuple(rooms)


def _pipeline_of(tenancy: Tenancy) -> tuple[str, str]:
    return tenancy.identity.app, tenancy.identity.pipeline
