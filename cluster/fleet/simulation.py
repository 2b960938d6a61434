"""A service over time: arrivals, pipelines, births and deaths of nodes, and autoscaling.

Discrete events by simpy. The number of pipelines is decided by the policy that a service runs
(`eesd_dist.routing.fleet`), from the same figures. Each pipeline has a node: it takes `birth_s` to
get one and `load_s` to load, and a spot node dies after an exponential time. Jobs of a dead node
wait for another pipeline, and are computed again from their tokens.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import simpy

from cluster.fleet.arrivals import Arrival
from cluster.fleet.outcome import Change, Outcome
from cluster.fleet.pipeline import Job, SimulatedPipeline
from cluster.fleet.setting import FleetSetting
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.routing.fleet.departure import Fleet


@dataclass(slots=True, kw_only=True)
class _Node:
    """A pipeline of the service, with or without its node so far."""

    born_s: float | None = None
    """Time at which its node came; None before that."""
    pipeline: SimulatedPipeline | None = None
    """None until it serves."""
    processes: list[simpy.Process] = field(default_factory=list)


class FleetSimulation:
    """A run of the simulation."""

    def __init__(self, setting: FleetSetting, load: Iterable[Arrival], *, seed: int) -> None:
        self._setting = setting
        self._load = load
        self._rng = Random(seed)
        self._env = simpy.Environment()
        self._fleet = Fleet(setting.targets, count=setting.initial, time_s=0.0)
        self._names = count()
        self._nodes: list[_Node] = []
        self._waiting: list[Job] = []
        self._num_live = 0
        self._load_over_s: float | None = None
        """Time by which the last request had arrived; None before that."""
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Runs until every request of the load is over, or its patience; returns what was seen."""
        for _ in range(self._setting.initial):
            self._add(is_ready=True)
        self._env.process(self._arrive())
        looking = self._env.process(self._look())
        self._env.run(until=looking)
        for node in self._nodes:
            self._release(node)
        self._account()
        self.outcome.lasted_s = self._env.now
        return self.outcome

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        for arrival in self._load:
            yield self._env.timeout(max(arrival.at_s - self._env.now, 0.0))
            self._take(arrival)
        self._load_over_s = self._env.now

    def _take(self, arrival: Arrival) -> None:
        """Takes a request, or refuses it where too many wait already."""
        self.outcome.num_arrived += 1
        if not self._serving() and len(self._waiting) >= self._setting.max_waiting:
            self.outcome.num_refusals += 1
            return
        self._account()
        self._num_live += 1
        self._send(Job(arrival=arrival))

    def _send(self, job: Job) -> None:
        """Gives a job to the least loaded pipeline that takes requests; without one it waits."""
        serving = self._serving()
        if serving:
            min(serving, key=lambda pipeline: (pipeline.num_live, pipeline.name)).add(job)
        else:
            self._waiting.append(job)

    def _serving(self) -> list[SimulatedPipeline]:
        return [
            node.pipeline
            for node in self._nodes
            if node.pipeline is not None and not node.pipeline.is_draining
        ]

    def _ended(self, job: Job) -> None:
        self._account()
        self._num_live -= 1
        assert job.first_token_s is not None
        self.outcome.first_token_s.append(job.first_token_s - job.arrival.at_s)
        self.outcome.sojourn_s.append(self._env.now - job.arrival.at_s)
        self.outcome.num_moves += job.num_moves

    def _account(self) -> None:
        self.outcome.note_live(self._num_live, time_s=self._env.now)

    def _look(self) -> Generator[simpy.Event, Any, None]:
        while not self._is_over():
            yield self._env.timeout(self._setting.look_s)
            self._decide()

    def _is_over(self) -> bool:
        if self._load_over_s is None:
            return False
        waited_s = self._env.now - self._load_over_s
        return self._num_live == 0 or waited_s >= self._setting.patience_s

    def _decide(self) -> None:
        was, present = self._fleet.state.decision, len(self._nodes)
        target = self._fleet.look(
            [self._report(node.pipeline) for node in self._nodes if node.pipeline is not None],
            targets=self._setting.targets,
            num_waiting=len(self._waiting),
            count=present,
            time_s=self._env.now,
        )
        decision = self._fleet.state.decision
        if decision != was:
            change = Change(at_s=self._env.now, was=was.target, target=decision.target)
            self.outcome.changes.append(change)
        for _ in range(target - present):
            self._add(is_ready=False)
        for _ in range(present - target):
            self._stop_newest()
        self._drain()

    def _drain(self) -> None:
        for node in self._nodes:
            if node.pipeline is not None:
                node.pipeline.is_draining = node.pipeline.name == self._fleet.leaving
        for node in self._nodes:
            if node.pipeline is not None and node.pipeline.is_draining and self._serving():
                self._move(node.pipeline.take_all())
        self._send_waiting()

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._send(job)

    def _move(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.num_moves += 1
            self._send(job)

    def _report(self, pipeline: SimulatedPipeline) -> PipelineReport:
        speed = self._setting.speed
        return PipelineReport(
            pipeline_id=PipelineId(pipeline.name),
            leader=pipeline.name,
            address=None,
            num_running=pipeline.num_live,
            draining=pipeline.is_draining,
            activity=pipeline.activity(),
            cost=speed.cost,
            max_running=speed.max_running,
        )

    def _add(self, *, is_ready: bool) -> None:
        node = _Node()
        self._nodes.append(node)
        node.processes.append(self._env.process(self._live(node, is_ready=is_ready)))

    def _live(self, node: _Node, *, is_ready: bool) -> Generator[simpy.Event, Any, None]:
        """Runs a pipeline from asking for its node to its end; a death begins it again."""
        try:
            while True:
                if not is_ready:
                    yield self._env.timeout(self._setting.birth_s)
                node.born_s = self._env.now
                if not is_ready:
                    yield self._env.timeout(self._setting.load_s)
                is_ready = False
                pipeline = self._serve(node)
                yield self._env.timeout(self._life_s())
                self._die(node, pipeline)
        except simpy.Interrupt:
            return

    def _life_s(self) -> float:
        mean_s = self._setting.mean_life_s
        return float("inf") if mean_s is None else self._rng.expovariate(1.0 / mean_s)

    def _serve(self, node: _Node) -> SimulatedPipeline:
        self.outcome.ready_s.append(self._env.now)
        pipeline = SimulatedPipeline(
            name=f"pipeline-{next(self._names)}",
            env=self._env,
            speed=self._setting.speed,
            ended=self._ended,
        )
        node.pipeline = pipeline
        self._env.process(pipeline.run())
        self._send_waiting()
        return pipeline

    def _die(self, node: _Node, pipeline: SimulatedPipeline) -> None:
        self.outcome.num_deaths += 1
        self._release(node, idle_s=0.0)
        node.pipeline = None
        self._move(pipeline.take_all())

    def _stop_newest(self) -> None:
        """Ends a pipeline as Serve would: one that does not serve yet, or else the newest."""
        idle = [node for node in self._nodes if node.pipeline is None]
        node = (idle or self._nodes)[-1]
        self._nodes.remove(node)
        self._release(node)
        for process in node.processes:
            process.interrupt()
        if node.pipeline is not None:
            self._move(node.pipeline.take_all())

    def _release(self, node: _Node, *, idle_s: float | None = None) -> None:
        """Ends a node: its hours count from its birth, the time without work at the end too."""
        if node.born_s is not None:
            idle_s = self._setting.node_idle_s if idle_s is None else idle_s
            self.outcome.node_s += self._env.now + idle_s - node.born_s
            node.born_s = None
