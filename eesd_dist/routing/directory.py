"""The directory of pipelines: membership by heartbeat, and a choice by load.

An address is passed on and never used here. The clock and the random numbers are passed in.

Between two heartbeats the directory counts its own assignments, so that a burst does not all go to
the pipeline that was idle at the last heartbeat.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from random import Random
from typing import Any, NewType

from eesd_dist.control.cost import CostModel
from eesd_dist.errors import CapacityError
from eesd_dist.routing.activity import NO_ACTIVITY, Activity

PipelineId = NewType("PipelineId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """An exit head that running pipelines switched to."""

    in_place_of: str
    """The head in their configuration; pipelines with another one are not affected."""
    head: str
    """Folder of the new head."""
    taken_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """Progress of a rank that loads its weights into memory."""

    rank: str
    bytes_done: int
    bytes_total: int
    """Size in the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """Progress of the start of a pipeline."""

    num_workers: int
    """Number of its slots with a process."""
    num_slots: int
    """0 before they are placed."""
    loads: tuple[RankLoad, ...] = ()
    """Progress of the ranks that have begun to load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """A pipeline's heartbeat."""

    pipeline_id: PipelineId
    leader: str
    """Name of the process that takes its requests; a replaced process has another."""
    address: Any
    """Address at which callers reach that process; not interpreted here."""
    ranks: Mapping[str, Any] = field(default_factory=dict)
    """All its processes, by rank name, the leader first: for KV migration."""
    crashed: tuple[str, ...] = ()
    """Latest leaders that have died of their own fault, and may be the victims of a request."""
    epoch: int = 0
    app: str = ""
    """The service it belongs to; requests never go to another service's pipelines."""
    num_running: int = 0
    num_waiting: int = 0
    is_ready: bool = True
    """False while workers are missing or make no progress: it generates no tokens now."""
    unavailable: str = ""
    """Reason why it is not ready, for how long, and what it waits for; empty if it is ready."""
    is_starting: bool = False
    """It has never been ready: for Serve its replica does not run yet."""
    start_s: float | None = None
    """Seconds that its start took, weights included; None before it was ready."""
    kv_tokens: int | None = None
    """Tokens that its KV pages hold; None before it was ready."""
    draining: bool = False
    """True: takes no new requests and finishes the old ones."""
    is_stopping: bool = False
    """Serve takes it down."""
    activity: Activity = NO_ACTIVITY
    cost: CostModel | None = None
    """Measured costs of the pipeline; None where nothing was measured."""
    max_running: int = 1
    """Requests that share its rounds at most."""
    weight: float | None = None
    """Speed of the pipeline, in a unit common to all; None where it was not measured."""
    promotion: Promotion | None = None
    """None: drafts with the exit head of its configuration."""
    start: StartReport | None = None
    """Progress of its start; None if it is ready, or `unavailable` says more."""

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.draining

    @property
    def membership(self) -> tuple[object, ...]:
        """Values that callers should know at once when they change."""
        return (self.leader, self.epoch, self.is_ready, self.draining)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A report as the directory passes it to an ingress."""

    report: PipelineReport
    age_s: float
    """Seconds since the heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRecord:
    """The directory's record of a pipeline."""

    report: PipelineReport
    received_s: float
    """Time of the heartbeat on the directory's clock."""
    num_assigned: int = 0
    """Requests assigned since the last heartbeat."""

    @property
    def load(self) -> int:
        return self.report.num_running + self.report.num_waiting + self.num_assigned


class PipelineDirectory:
    """The known pipelines. A record expires without a heartbeat."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        rng: Random,
        expiry_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._expiry_s = expiry_s
        self._records: dict[PipelineId, PipelineRecord] = {}
        self._promotions: dict[str, Promotion] = {}
        """The latest for each configuration; kept when the reporting pipeline is gone."""

    def heartbeat(self, report: PipelineReport) -> bool:
        """Adds a pipeline, or updates its record; returns whether its membership has changed."""
        if report.promotion is not None:
            self._note(report.promotion)
        previous = self._records.get(report.pipeline_id)
        self._records[report.pipeline_id] = PipelineRecord(report=report, received_s=self._clock())
        return previous is None or previous.report.membership != report.membership

    def leave(self, pipeline_id: PipelineId) -> None:
        self._records.pop(pipeline_id, None)

    def expire(self) -> tuple[PipelineId, ...]:
        """Removes pipelines without a recent heartbeat and returns them."""
        deadline = self._clock() - self._expiry_s
        silent = tuple(i for i, record in self._records.items() if record.received_s < deadline)
        for pipeline_id in silent:
            del self._records[pipeline_id]
        return silent

    def records(self) -> tuple[PipelineRecord, ...]:
        self.expire()
        return tuple(self._records.values())

    def promotion(self, in_place_of: str) -> Promotion | None:
        """Returns the promoted head for pipelines configured with this one, or None."""
        return self._promotions.get(in_place_of)

    def listed(self, app: str | None = None) -> tuple[Listed, ...]:
        """Returns the last reports of one service's pipelines, with their age; None: of all."""
        time_s = self._clock()
        return tuple(
            Listed(report=record.report, age_s=time_s - record.received_s)
            for record in self.records()
            if app in (None, record.report.app)
        )

    def choose(
        self, *, app: str | None = None, excluded: Collection[PipelineId] = ()
    ) -> PipelineReport:
        """Returns the pipeline for one more request and counts it as assigned there.

        `app` limits the choice to one service; `excluded` are pipelines that the caller has seen
        fail. Raises CapacityError.
        """
        candidates = [
            record
            for record in self.records()
            if record.report.takes_requests
            and app in (None, record.report.app)
            and record.report.pipeline_id not in excluded
        ]
        if not candidates:
            raise CapacityError(
                f"no pipeline takes requests now: {len(self._records)} known, all of them "
                f"draining, unavailable, of another service or among the {len(excluded)} that just "
                "failed; try again in a moment"
            )
        return self._assign(self._least_loaded(candidates))

    def describe(self) -> list[dict[str, object]]:
        """Returns plain JSON, for operators."""
        time_s = self._clock()
        return [
            {**_as_json(record.report), "load": record.load, "silent_s": time_s - record.received_s}
            for record in self.records()
        ]

    def _note(self, promotion: Promotion) -> None:
        previous = self._promotions.get(promotion.in_place_of)
        if previous is None or previous.taken_unix_s < promotion.taken_unix_s:
            self._promotions[promotion.in_place_of] = promotion

    def _least_loaded(self, candidates: list[PipelineRecord]) -> PipelineRecord:
        min_load = min(record.load for record in candidates)
        return self._rng.choice([record for record in candidates if record.load == min_load])

    def _assign(self, record: PipelineRecord) -> PipelineReport:
        report = record.report
        self._records[report.pipeline_id] = replace(record, num_assigned=record.num_assigned + 1)
        return report


def _as_json(report: PipelineReport) -> dict[str, object]:
    """Returns a report without its address, which is no JSON."""
    content = {field.name: getattr(report, field.name) for field in fields(report)}
    del content["address"], content["ranks"], content["cost"]
    promotion, start = report.promotion, report.start
    return content | {
        "start": None if start is None else asdict(start),
        "activity": asdict(report.activity),
        "promotion": None if promotion is None else asdict(promotion),
    }
