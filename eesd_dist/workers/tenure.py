"""A worker's lease: its supervisor, and its end when it has none any more.

Workers outlive their supervisor, so that a lost replica reloads no model: the next one claims them.
A worker with a lease that is not renewed has no supervisor and will get none, and ends by itself.
The lease runs down only while the process runs: a machine that was suspended loses no worker.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)

from eesd_dist.errors import LeaseLost
from eesd_dist.workers.crash_report import report_crashes
from eesd_dist.workers.messages import Lease, Tenancy, WorkerIdentity
from eesd_dist.workers.process import process_info

logger = logging.getLogger(__name__)

LAST_WAIT_S = 10.0
"""The worker that removes the placement groups waits at most so long for the others to exit."""
_POLL_S = 0.25


class Tenure:
    """The lease of one worker process, run down by a thread of its own."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        lease_s: float,
        expired: Callable[[], None],
        owner: str = "",
        tick_s: float = 1.0,
    ) -> None:
        """`expired` ends the process. The first lease begins now. Without an `owner`, it belongs to
        the first supervisor that renews it."""
        self.identity = identity
        self._expired = expired
        self._tick_s = tick_s
        self._owner = owner
        self._start_s: float | None = None
        self._lease_s = self._left_s = lease_s
        threading.Thread(target=self._run_down, name="eesd-lease", daemon=True).start()

    def tenancy(
        self,
        *,
        epoch: int,
        newest_epoch: int,
        num_pages: int,
        is_degraded: bool,
        head: str = "",
    ) -> Tenancy:
        return Tenancy(
            identity=self.identity,
            owner=self._owner,
            process_info=process_info(),
            epoch=epoch,
            newest_epoch=newest_epoch,
            num_pages=num_pages,
            is_degraded=is_degraded,
            head=head,
            start_s=self._start_s,
            lease_s=self._lease_s,
            left_s=max(0.0, self._left_s),
        )

    def renew(self, lease: Lease) -> None:
        """Raises LeaseLost for a supervisor that has lost the worker to another."""
        if self._owner not in ("", lease.owner):
            raise LeaseLost(
                f"{self.identity.slot} of {self.identity.pipeline} has another supervisor: "
                f"{self._owner}, not {lease.owner}"
            )
        self._hold(lease)

    def claim(self, lease: Lease, *, of: str) -> WorkerIdentity:
        """Passes the worker from the supervisor `of`, which is dead, to another one.

        Raises LeaseLost when a third one was faster.
        """
        if self._owner not in (of, lease.owner):
            raise LeaseLost(
                f"{self.identity.slot} of {self.identity.pipeline} is claimed by {self._owner}"
            )
        logger.info("claimed: slot=%s owner=%s", self.identity.slot, lease.owner)
        self._hold(lease)
        return self.identity

    def take_slot(self, slot: str) -> None:
        """Notes the slot that a spare has taken; its bundle stays the same."""
        bundle = self.identity.bundle or self.identity.slot
        self.identity = replace(self.identity, slot=slot, bundle=bundle)

    def _hold(self, lease: Lease) -> None:
        self._owner, self._start_s = lease.owner, lease.start_s
        self._lease_s = self._left_s = lease.seconds

    def _run_down(self) -> None:
        while self._left_s > 0:
            began_s = time.monotonic()
            time.sleep(self._tick_s)
            # A process that was stopped could hear no renewal.
            self._left_s -= min(time.monotonic() - began_s, 2 * self._tick_s)
        logger.warning(
            "no supervisor: slot=%s pipeline=%s owner=%s",
            self.identity.slot,
            self.identity.pipeline,
            self._owner,
        )
        self._expired()


def pipeline_prefix(app: str, pipeline: str) -> str:
    """Returns how the Ray names of a pipeline's workers and placement groups begin."""
    return f"{app}/{pipeline}/"


def workers_named(prefix: str, *, namespace: str) -> dict[str, str]:
    """Returns the Ray names of the workers that begin so, by the name of their pipeline."""
    pipelines: dict[str, str] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(prefix):
            pipelines[actor["name"]] = actor["name"].removeprefix(prefix).split("/")[0]
    return pipelines


def placement_groups_named(prefix: str) -> dict[str, PlacementGroup]:
    """Returns the placement groups with such a name that are not removed, by name."""
    return {
        group["name"]: PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number)))
        for number, group in placement_group_table().items()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    }


def detached_tenure(
    identity: WorkerIdentity, *, owner: str, namespace: str, lease_s: float
) -> Tenure:
    """Returns the lease of a detached actor, and lets its process report crashes.

    When the lease expires, the process exits, and the last one of its pipeline removes the
    placement groups.
    """
    prefix = pipeline_prefix(identity.app, identity.pipeline)
    name = ray.get_runtime_context().get_actor_name() or ""

    def expired() -> None:
        try:
            if _is_last(name, lambda: workers_named(prefix, namespace=namespace)):
                for group in placement_groups_named(prefix).values():
                    remove_placement_group(group)
        except Exception:  # Ray's errors while its head is away; the process ends in any case
            logger.exception("placement groups not removed: pipeline=%s", identity.pipeline)
        os._exit(0)

    report_crashes()
    return Tenure(identity, owner=owner, lease_s=lease_s, expired=expired)


def _is_last(name: str, present: Callable[[], Collection[str]]) -> bool:
    """Returns whether no other worker is left. The one with the first name waits for the others:
    two that left at the same time would each take the other for the last."""
    deadline_s = time.monotonic() + LAST_WAIT_S
    while others := set(present()) - {name}:
        if min(others) < name or time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
