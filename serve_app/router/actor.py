"""The router: what all pipelines have learnt about acceptance, and the directory of pipelines.

One named, detached actor of the control plane. It is told of rounds after they are over and answers
with beliefs for later rounds; no token passes through it, and no round waits for it. Ray restarts
it when it dies, and it continues from its checkpoint. Operators pin, save and load its pools over
Ray: access to a cluster's Ray is full access to it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import ray

from cluster.ray_compat import actor_class
from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.errors import CapacityError, EesdError, EngineError
from eesd_dist.routing.beliefs import (
    BeliefBook,
    Priors,
    pools_from_json,
    priors_to_json,
    read_snapshot,
)
from eesd_dist.routing.directory import (
    Listed,
    PipelineDirectory,
    PipelineId,
    PipelineReport,
    Promotion,
)
from eesd_dist.routing.fleet.departure import Fleet, FleetState
from eesd_dist.routing.fleet.size import FleetTargets
from eesd_dist.routing.ingress_reports import IngressReport, IngressReports
from eesd_dist.routing.quotas import Held, Quota, QuotaBook, Standing
from eesd_dist.telemetry.logs import LogFormat
from eesd_dist.workers.messages import ProcessInfo, RouterAdvice, RouterNews
from eesd_dist.workers.process import prepare_process, process_info
from serve_app.config import RouterConfig, ServiceConfig

logger = logging.getLogger(__name__)

MAX_NAMES = 200
MAX_NAMES_OF_A_CALLER = 100
_SILENT_S = 600.0
"""Time without news after which a request has ended while its pipeline or this router was away."""


class FirstNames:
    """The first names of those that were ever noted: they do not change any more when they are
    `limit`.

    Clients name workload classes, and Prometheus keeps a time series after its class is forgotten
    here: only these names get labels of their own, and one caller names at most half of them.
    """

    def __init__(
        self, *, limit: int = MAX_NAMES, limit_of_a_caller: int = MAX_NAMES_OF_A_CALLER
    ) -> None:
        self._limit = limit
        self._limit_of_a_caller = limit_of_a_caller
        self._names: dict[str, None] = {}
        self._num_of: Counter[str] = Counter()
        """Names that a caller was the first to use."""

    def note(self, names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Adds names, each with its caller, while there is room; returns all that have been added
        so far."""
        for caller, name in names:
            has_room = len(self._names) < self._limit
            if has_room and name not in self._names and self._has_room(caller):
                self._num_of[caller] += 1
                self._names[name] = None
        return tuple(self._names)

    def _has_room(self, caller: str) -> bool:
        return self._num_of[caller] < self._limit_of_a_caller


class Router:
    """Wrapped as an actor by `router_handle`."""

    def __init__(
        self,
        config: RouterConfig,
        speculation: SpeculationConfig,
        log_format: LogFormat = "text",
    ) -> None:
        prepare_process(log_format)
        self._config = config
        self._book = BeliefBook(discount=speculation.discount)
        self._directory = PipelineDirectory(
            clock=time.monotonic, rng=Random(speculation.seed), expiry_s=config.expiry_s
        )
        self._ingresses = IngressReports(expiry_s=config.expiry_s)
        self._quotas: dict[str, QuotaBook] = {}
        """Quotas by service."""
        self._fleets: dict[str, Fleet] = {}
        """Fleets by service, where their number of pipelines is autoscaled."""
        self._membership = 0
        """Counts the changes that ingresses should know at once."""
        self._changed = asyncio.Event()
        """Set at every such change, and then replaced."""
        self._born = uuid4().hex[:8]
        """Tells version numbers of this router from those of an earlier one."""
        self._first_names = FirstNames()
        """Workload classes with a label of their own in metrics."""
        self._turned_s = time.monotonic()
        self._saved_s = time.monotonic()
        self._saving: asyncio.Task[None] | None = None
        """The latest checkpoint, done or not; None before the first."""
        self._one_save = asyncio.Lock()
        self._recall()

    async def advise(self, update: RouterNews) -> RouterAdvice:
        """Learns from finished rounds; returns the plans of the requests in `update`."""
        plans = {
            new.request_id: self._book.admit(new.request_id, new.workload, caller=new.caller)
            for new in update.admitted
        }
        plans |= self._book.observe(update.outcomes)
        for request_id in update.finished:
            self._book.finish(request_id)
            plans.pop(request_id, None)
        self._save_sometimes()
        priors_id = f"{self._born}-{self._book.version}"
        is_stale = update.priors_id not in (None, priors_id)
        return RouterAdvice(
            plans=plans, priors=self._book.priors() if is_stale else None, priors_id=priors_id
        )

    async def heartbeat(self, report: PipelineReport) -> bool:
        """Takes a pipeline's heartbeat; returns whether it has to take no more requests."""
        if self._directory.heartbeat(report):
            self._membership += 1
            self._changed.set()
            self._changed = asyncio.Event()
        if time.monotonic() - self._turned_s >= _SILENT_S:
            self._turned_s = time.monotonic()
            self._book.turn_page()
        fleet = self._fleet(report.app)
        return fleet is not None and fleet.leaving == report.pipeline_id

    async def pipelines(
        self,
        app: str,
        membership_id: str,
        wait_s: float,
        ingress: str = "",
        num_waiting: int = 0,
        targets: FleetTargets | None = None,
    ) -> tuple[str, tuple[Listed, ...]]:
        """Returns the latest reports of one service's pipelines, and the number of the membership.

        Waits up to `wait_s` while that number is `membership_id`. `num_waiting` requests wait at
        this ingress for a pipeline; `targets`, from its `user_config`, replace those of the
        application.
        """
        if ingress:
            self._ingresses.note(
                app,
                ingress,
                IngressReport(
                    num_waiting=num_waiting, targets=targets, received_s=time.monotonic()
                ),
            )
        if membership_id == self._membership_id:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        return self._membership_id, self._directory.listed(app)

    async def note_page(self, app: str, ingress: str, page: bytes) -> None:
        """Takes the metrics of an ingress, which any other one shows with its own."""
        self._ingresses.note_page(app, ingress, page)

    async def ingress_pages(self, app: str) -> dict[str, bytes]:
        """Returns the latest metrics of each ingress of a service, as Prometheus text."""
        return self._ingresses.pages(app, time_s=time.monotonic())

    async def acquire(
        self, app: str, caller: str, quota: Quota, permit: str, ingress: str
    ) -> Standing:
        """Gives a permit for one request of a caller, or refuses it."""
        return self._quota_book(app).acquire(
            caller, quota, permit=permit, ingress=ingress, time_s=time.monotonic()
        )

    async def reserve(
        self, app: str, caller: str, quota: Quota, permit: str, ingress: str, num_tokens: int
    ) -> Standing:
        """Reserves tokens for a request that has a permit, or refuses that."""
        return self._quota_book(app).reserve(
            caller,
            quota,
            permit=permit,
            ingress=ingress,
            num_tokens=num_tokens,
            time_s=time.monotonic(),
        )

    async def release(
        self, app: str, caller: str, permit: str, ingress: str, num_tokens: int
    ) -> None:
        """Takes a permit back, and charges the tokens that its request has used."""
        book = self._quota_book(app)
        time_s = time.monotonic()
        book.release(caller, permit=permit, ingress=ingress, num_tokens=num_tokens, time_s=time_s)

    async def hold(self, app: str, ingress: str, held: Held) -> None:
        """Takes the permits that are in use at an ingress, in place of those known."""
        self._quota_book(app).hold(ingress, held, time_s=time.monotonic())

    def _quota_book(self, app: str) -> QuotaBook:
        return self._quotas.setdefault(app, QuotaBook(expiry_s=self._config.expiry_s))

    @property
    def _membership_id(self) -> str:
        return f"{self._born}-{self._membership}"

    async def choose(
        self, app: str, excluded: Collection[PipelineId] = ()
    ) -> PipelineReport | None:
        """Returns a ready pipeline of this service that takes one more request, or None."""
        try:
            return self._directory.choose(app=app, excluded=excluded)
        except CapacityError:
            return None

    async def size_fleet(self, app: str, targets: FleetTargets, count: int) -> int:
        """Returns how many pipelines a service should have from now on; `count` is what it has, and
        stays while no ingress reports."""
        time_s = time.monotonic()
        ingress = self._ingresses.latest(app, time_s=time_s)
        if ingress is None:  # which targets hold is not known yet
            return count
        targets = ingress.targets or targets
        fleet = self._fleet(app)
        if fleet is None:
            fleet = self._fleets[app] = Fleet(targets, count=count, time_s=time_s)
        was = fleet.state.decision
        size = fleet.look(
            [listed.report for listed in self._directory.listed(app)],
            targets=targets,
            num_waiting=self._ingresses.num_waiting(app, time_s=time_s),
            count=count,
            time_s=time_s,
        )
        decision = fleet.state.decision
        if decision != was:
            logger.info(
                "autoscaling: app=%s was=%d wanted=%d signal=%s reason=%s",
                *(app, was.target, decision.target, decision.signal, decision.reason),
            )
        return size

    def _fleet(self, app: str) -> Fleet | None:
        """Returns the fleet of a service that Serve asks for: this process outlives services."""
        fleet = self._fleets.get(app)
        if fleet is not None and time.monotonic() - fleet.looked_s > self._config.expiry_s:
            del self._fleets[app]
            return None
        return fleet

    async def fleet(self, app: str) -> FleetState | None:
        """Returns how many pipelines a service should have, and why; None where their number is
        fixed. Times are turned into ages: they are this process's."""
        fleet = self._fleet(app)
        if fleet is None:
            return None
        decision = fleet.state.decision
        aged = replace(decision, since_s=time.monotonic() - decision.since_s)
        return replace(fleet.state, decision=aged)

    async def promotion(self, head_key: str) -> Promotion | None:
        """Returns the exit head that replaces the one of this configuration, or None.

        It is not kept on disk: pipelines report it with every heartbeat, to a restarted router too.
        """
        return self._directory.promotion(head_key)

    async def process_info(self) -> ProcessInfo:
        return process_info()

    async def describe(self) -> dict[str, object]:
        """Returns the router's state for operators, as plain JSON."""
        live, pools = self._book.live_by_workload(), self._book.pools()
        return {
            "named": self._first_names.note(self._book.names()),
            "pinned": self._book.is_pinned,
            "checkpoint": str(self._config.checkpoint) if self._config.checkpoint else None,
            "pipelines": self._directory.describe(),
            "workloads": {
                name: {
                    **belief.to_json(),
                    "mean": belief.mean,
                    "weight": belief.weight,
                    "num_live": live.get(name, 0),
                }
                for name in sorted(pools.keys() | live.keys())
                for belief in (pools.get(name, Belief()),)
            },
            "num_live": self._book.num_live,
        }

    async def priors(self) -> dict[str, object]:
        """Returns all pools, over all callers, in the form that `set_priors` takes."""
        return priors_to_json(Priors(pools=self._book.pools(), is_pinned=self._book.is_pinned))

    async def set_priors(self, snapshot: Mapping[str, object]) -> int:
        """Replaces the pools and returns their number; live requests keep their beliefs.

        Raises ConfigError for an invalid snapshot.
        """
        pools = pools_from_json(snapshot)
        self._book.adopt(Priors(pools=pools, is_pinned=self._book.is_pinned))
        await self._save()
        return len(pools)

    async def pin(self) -> None:
        self._book.pin()
        await self._save()

    async def unpin(self) -> None:
        self._book.unpin()
        await self._save()

    def _recall(self) -> None:
        """Loads the checkpoint; without one, or where pools are pinned, the operator's priors."""
        config = self._config
        try:
            if config.checkpoint is not None and config.checkpoint.is_file():
                self._book.load(config.checkpoint)
        except EesdError as error:  # beliefs are a cache: without them the service is only slower
            logger.error("beliefs not recalled: error=%s", error)
        try:
            if config.priors is not None and (config.pinned or not self._book.pools()):
                pools = pools_from_json(read_snapshot(config.priors))
                self._book.adopt(Priors(pools=pools, is_pinned=self._book.is_pinned))
        except EesdError as error:
            logger.error("priors not loaded: error=%s", error)
        if config.pinned:
            self._book.pin()

    def _save_sometimes(self) -> None:
        if self._config.checkpoint is None or (self._saving and not self._saving.done()):
            return
        if time.monotonic() - self._saved_s >= self._config.checkpoint_every_s:
            self._saving = asyncio.ensure_future(self._save())

    async def _save(self) -> None:
        """Saves a copy in a thread, so that plans do not wait for the disk."""
        file = self._config.checkpoint
        if file is None:
            return
        async with self._one_save:
            self._saved_s = time.monotonic()
            await asyncio.to_thread(_save, self._book.copy(), file)


def _save(book: BeliefBook, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        book.save(file)
    except OSError as error:
        logger.error("beliefs not saved: file=%s error=%s", file, error)


def router_handle(config: ServiceConfig) -> Any:
    """Returns the one router of this name; starts it if there is none."""
    return (
        actor_class(Router)
        .options(
            name=config.router.name,
            namespace=config.router.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            resources=config.placement.front,
            max_concurrency=1000,
            enable_task_events=False,
        )
        .remote(config.router, config.engine.speculation, config.log_format)
    )


def find_router(config: RouterConfig) -> Any:
    """Returns the running router. Raises EngineError if there is none."""
    try:
        return ray.get_actor(config.name, namespace=config.namespace)
    except ValueError as error:
        raise EngineError(
            f"no router {config.name!r} in Ray's namespace {config.namespace!r}: is the service "
            "running there?"
        ) from error
