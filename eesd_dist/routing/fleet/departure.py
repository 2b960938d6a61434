"""Fewer pipelines without a broken stream: one is drained before the number is lowered.

The emptiest pipeline takes no more requests, and its streams continue in others; when it has none
left, or after a limit, the number goes down by one. Which replica is then stopped is Serve's
choice: any replica migrates its streams first, and a pipeline that was drained for nothing takes
requests again. Pure: time is an input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.routing.fleet.load import FleetLoad, PipelineLoad
from eesd_dist.routing.fleet.size import FleetDecision, FleetSize, FleetTargets


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
        self, targets: FleetTargets, *, count: int, now_s: float, drain_limit_s: float = 60.0
    ) -> None:
        """A pipeline with streams after `drain_limit_s` is given up all the same."""
        self._size = FleetSize(targets, count=count, now_s=now_s)
        self._drain_limit_s = drain_limit_s
        self._leaving: PipelineId | None = None
        self._leaving_since_s = now_s
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
        now_s: float,
    ) -> int:
        """Returns how many pipelines there should be from now on; `count` is how many there are or
        will be."""
        self._size.targets = targets
        was = self._size.decision
        load = FleetLoad(pipelines=tuple(map(load_of, reports)), num_waiting=num_waiting)
        decision = self._size.look(load, now_s=now_s)
        if decision != was:
            key = ("up" if decision.wanted > was.wanted else "down", decision.signal)
            self._num_changes[key] = self._num_changes.get(key, 0) + 1
        released = self._released(reports, wanted=decision.wanted, count=count, now_s=now_s)
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
        self, reports: Sequence[PipelineReport], *, wanted: int, count: int, now_s: float
    ) -> int:
        lasted_s = now_s - self._leaving_since_s
        is_late = lasted_s >= self._drain_limit_s
        if wanted > count or _is_settled(reports, wanted=wanted) or (wanted == count and is_late):
            self._leaving = None
        if wanted >= count or wanted == 0:
            return wanted
        if self._leaving is None:
            self._leaving, self._leaving_since_s = _emptiest(reports, count=count), now_s
            return count if self._leaving is not None else count - 1
        return count - 1 if is_late or _has_left(reports, self._leaving) else count


def load_of(report: PipelineReport) -> PipelineLoad:
    return PipelineLoad(
        num_live=report.num_running,
        activity=report.activity,
        max_tokens_per_s=report.max_tokens_per_s,
        is_serving=report.takes_requests,
    )


def _is_settled(reports: Sequence[PipelineReport], *, wanted: int) -> bool:
    """Returns whether Serve has chosen the replica that it stops."""
    return any(report.is_stopping for report in reports) or len(reports) <= wanted


def _emptiest(reports: Sequence[PipelineReport], *, count: int) -> PipelineId | None:
    """Returns the pipeline with the fewest streams; None where no other could take them, or where
    one of the `count` pipelines has none, since it is not ready."""
    ready = [report for report in reports if report.takes_requests]
    if len(ready) < max(count, 2):
        return None
    return min(ready, key=lambda each: (each.num_running, each.pipeline_id)).pipeline_id


def _has_left(reports: Sequence[PipelineReport], leaving: PipelineId) -> bool:
    """Returns whether the pipeline has no streams any more, and gets none."""
    report = next((each for each in reports if each.pipeline_id == leaving), None)
    return report is None or (report.draining and report.num_running == 0)
