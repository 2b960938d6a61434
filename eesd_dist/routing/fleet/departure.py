"""Fewer pipelines without a broken stream: one is drained before the number is lowered.

The emptiest pipeline takes no more requests, and its streams continue in others; when it has none
left, or after a limit, the number goes down by one. Which replica is then stopped is Serve's
choice: any replica migrates its streams first, and a pipeline that was drained for nothing takes
requests again. The next one is drained when Serve has chosen. Pure: time is an input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eesd_dist.routing.activity import max_tokens_per_s
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.routing.fleet.size import (
    FleetDecision,
    FleetLoad,
    FleetSize,
    FleetTargets,
    PipelineLoad,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """The fleet of a service, for operators and metrics."""

    decision: FleetDecision
    targets: FleetTargets
    count: int
    """Pipelines that Serve has or starts."""
    num_ready: int
    num_draining: int
    num_waiting: int
    """Requests at ingresses for which no pipeline is ready."""
    leaving: str
    """The pipeline that is drained to be stopped; empty if there is none."""
    num_changes: dict[tuple[str, str], int]
    """Decisions so far, by direction (up, down) and signal."""

    @property
    def num_starting(self) -> int:
        return max(self.count - self.num_ready - self.num_draining, 0)


class Fleet:
    """The pipelines of one service: how many there should be, and which one is drained."""

    def __init__(
        self, targets: FleetTargets, *, count: int, time_s: float, drain_limit_s: float = 60.0
    ) -> None:
        """A pipeline with streams after `drain_limit_s` is given up all the same."""
        self._size = FleetSize(targets, count=count, time_s=time_s)
        self._drain_limit_s = drain_limit_s
        self._leaving: PipelineId | None = None
        self._lowered_to: int | None = None
        """The lowered number, until Serve has chosen the replica that it stops."""
        self.looked_s = time_s
        """Time of the last call of `look`."""
        self._since_s = time_s
        """Time when the last pipeline was drained, or the number was lowered."""
        self._num_changes: dict[tuple[str, str], int] = {}
        self.state = FleetState(
            decision=self._size.decision,
            targets=targets,
            count=count,
            num_ready=0,
            num_draining=0,
            num_waiting=0,
            leaving="",
            num_changes=self._num_changes,
        )

    @property
    def leaving(self) -> PipelineId | None:
        """The pipeline that has to take no more requests; None if there is none."""
        return self._leaving

    def look(
        self,
        reports: Sequence[PipelineReport],
        *,
        targets: FleetTargets,
        num_waiting: int,
        count: int,
        time_s: float,
    ) -> int:
        """Returns how many pipelines there should be from now on; `count` is how many there are or
        will be."""
        self.looked_s = time_s
        self._size.targets = targets
        was = self._size.decision
        pipelines = tuple(load_of(report, targets) for report in reports)
        load = FleetLoad(pipelines=pipelines, num_waiting=num_waiting)
        decision = self._size.look(load, time_s=time_s)
        if decision != was:
            key = ("up" if decision.target > was.target else "down", decision.signal)
            self._num_changes[key] = self._num_changes.get(key, 0) + 1
        released = self._released(reports, target=decision.target, count=count, time_s=time_s)
        self.state = replace(
            self.state,
            decision=decision,
            targets=targets,
            count=count,
            num_ready=sum(report.takes_requests for report in reports),
            num_draining=sum(report.draining for report in reports),
            num_waiting=num_waiting,
            leaving=self._leaving or "",
            num_changes=dict(self._num_changes),
        )
        return released

    def _released(
        self, reports: Sequence[PipelineReport], *, target: int, count: int, time_s: float
    ) -> int:
        is_stopping = any(report.is_stopping for report in reports)
        is_overdue = time_s - self._since_s >= self._drain_limit_s
        if self._lowered_to is not None:
            if is_stopping or is_overdue or len(reports) <= self._lowered_to:
                self._leaving = self._lowered_to = None
            else:
                count = min(count, self._lowered_to)
        if target > count or target == 0:
            self._leaving = self._lowered_to = None
            return target
        if self._lowered_to is not None or (is_stopping and target < count):
            return count
        if target == count:
            self._leaving = None
            return count
        if self._leaving is None:
            if _stops_one_that_starts(reports, count=count):
                return self._lower(count - 1, time_s=time_s)
            self._leaving, self._since_s = _emptiest(reports, count=count), time_s
        elif is_overdue or _has_left(reports, self._leaving):
            return self._lower(count - 1, time_s=time_s)
        return count

    def _lower(self, count: int, *, time_s: float) -> int:
        self._lowered_to, self._since_s = count, time_s
        return count


def load_of(report: PipelineReport, targets: FleetTargets) -> PipelineLoad:
    num_live = max(min(round(targets.live_requests), report.max_running), 1)
    return PipelineLoad(
        num_live=report.num_running,
        activity=report.activity,
        max_tokens_per_s=max_tokens_per_s(report.cost, report.activity, num_live=num_live),
        is_serving=report.takes_requests,
    )


def _stops_one_that_starts(reports: Sequence[PipelineReport], *, count: int) -> bool:
    """Returns whether one of the `count` pipelines has not started yet. Serve stops such a replica
    first; one that was ready before is running for it, whatever it does now."""
    return len(reports) < count or any(report.is_starting for report in reports)


def _emptiest(reports: Sequence[PipelineReport], *, count: int) -> PipelineId | None:
    """Returns the pipeline with the fewest streams. None while one of the `count` pipelines takes
    no requests, since it recovers or was drained by hand: Serve might stop one that does."""
    ready = [report for report in reports if report.takes_requests]
    if len(ready) < max(count, 2):
        return None
    return min(ready, key=lambda report: (report.num_running, report.pipeline_id)).pipeline_id


def _has_left(reports: Sequence[PipelineReport], leaving: PipelineId) -> bool:
    """Returns whether the pipeline has no streams any more, and gets none."""
    report = next((report for report in reports if report.pipeline_id == leaving), None)
    return report is None or (report.draining and report.num_running == 0)
