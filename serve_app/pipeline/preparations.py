"""Preparations for deaths, during rounds: spares, fallbacks, and measured costs."""

import asyncio
import logging
from collections.abc import Mapping

from eesd_dist.errors import EesdError
from eesd_dist.workers.messages import ControlReport
from serve_app.pipeline.worker import Worker
from serve_app.pipeline.workers import Workers

logger = logging.getLogger(__name__)


class Preparations:
    """Prepares what the streams of one pipeline would otherwise wait for."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._tasks: set[asyncio.Task[None]] = set()
        self._cost: tuple[str, Mapping[str, object]] | None = None
        """Node of the last drafting actor, and what its engine measured there."""

    def cost_known_to(self, worker: Worker) -> list[Mapping[str, object]]:
        """Returns what an earlier drafting actor has measured on the worker's node, if anything."""
        if worker.slot.rank is not None or self._cost is None:
            return []
        node_id, cost = self._cost
        return [cost] if node_id == worker.process_info.node_id else []

    def start(self, leader: Worker) -> None:
        """Prepares, during rounds, what streams would otherwise wait for."""
        preparations = [
            self._learn_cost(leader),
            self._workers.spares.keep(self._prepare_spare),
        ]
        if self._workers.spec.engine.parallel.fallback:
            num_draft_ranks = sum(slot.stage == "draft" for slot in self._workers.slots)
            verify = [m for m in self._workers if m.slot.stage == "verify"]
            hosts = verify[:num_draft_ranks]
            preparations += [self._prepare_fallback(host) for host in hosts]
        for preparation in preparations:
            task = asyncio.ensure_future(preparation)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _prepare_spare(self, spare: Worker) -> None:
        if spare.slot.stage == "draft":
            await spare.ask("prepare", "preparation", *self.cost_known_to(spare))

    async def _prepare_fallback(self, host: Worker) -> None:
        try:
            await host.ask("fallback", "preparation", "prepare")
        except EesdError as error:  # asked again when it is needed
            logger.warning("fallback not prepared: %s error=%s", host.label, error)

    async def _learn_cost(self, leader: Worker) -> None:
        """Keeps the costs for the next drafting actor on the node: measuring delays streams."""
        try:
            control: ControlReport = await leader.ask("control", "preparation")
        except EesdError as error:
            logger.warning("costs not learnt: %s error=%s", leader.label, error)
        else:
            cost = control.cost
            self._cost = None if cost is None else (leader.process_info.node_id, cost)
