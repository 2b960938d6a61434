"""Load of the pipelines of a service, as autoscaling sees it."""

from dataclasses import dataclass

from eesd_dist.routing.activity import NO_ACTIVITY, Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoad:
    """Load of one pipeline."""

    num_live: int = 0
    """Requests that it serves, those in its queue included."""
    activity: Activity = NO_ACTIVITY
    max_tokens_per_s: float | None = None
    """Measured capacity at the target of live requests; None where nothing was measured."""
    is_serving: bool = True
    """It is ready and takes requests. False: it starts, is draining or unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Load of all pipelines of a service."""

    pipelines: tuple[PipelineLoad, ...] = ()
    num_waiting: int = 0
    """Requests at ingresses for which no pipeline is ready."""

    @property
    def num_live(self) -> int:
        """Requests at pipelines and ingresses."""
        return self.num_waiting + sum(pipeline.num_live for pipeline in self.pipelines)

    @property
    def num_queued(self) -> int:
        """Requests among these that are in the queues of pipelines."""
        return sum(pipeline.activity.num_waiting for pipeline in self.pipelines)

    @property
    def serving(self) -> tuple[PipelineLoad, ...]:
        return tuple(pipeline for pipeline in self.pipelines if pipeline.is_serving)
