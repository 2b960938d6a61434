"""Which pipelines there are, how busy they are, and which one takes a request.

Decides membership by heartbeat and placement by load. Refuses to know what a pipeline is made of
and how it is reached: an address is a word it passes on. The clock and the dice come from outside.

Between two heartbeats the directory counts what it has handed out itself, so that a burst does not
all land on the pipeline that was idle a moment ago.
"""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Literal, NewType

from eesd_dist.errors import CapacityError

PipelineId = NewType("PipelineId", str)

_KEPT_FOR = 24.0
"""So many times `expiry_s` is a silent ingress named, before it is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """An exit head that pipelines took while they ran."""

    in_place_of: str
    """What their configuration says; pipelines configured otherwise are not meant."""
    head: str
    """Its folder."""
    taken_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """What a pipeline says of itself with every heartbeat."""

    pipeline_id: PipelineId
    address: str
    """How callers reach it; not looked at here."""
    app: str = ""
    """Which service it belongs to: a request of one is never handed to another's pipelines."""
    num_running: int = 0
    num_waiting: int = 0
    is_ready: bool = True
    """False has lost a worker, or has not got them all yet: nothing comes out of it now."""
    draining: bool = False
    """True takes no new request, and goes on with the old ones."""
    weight: float | None = None
    """Its speed, in whatever unit its kind has in common; None where nobody measured it."""
    promotion: Promotion | None = None
    """None drafts with the exit head of its configuration."""

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.draining


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A report as an ingress gets to see it: second hand."""

    report: PipelineReport
    age_s: float
    """Seconds since the pipeline said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRecord:
    """A pipeline as the directory sees it."""

    report: PipelineReport
    heard_s: float
    """On the directory's own clock."""
    num_assigned: int = 0
    """Handed out since the last heartbeat, which may not know of them yet."""

    @property
    def load(self) -> int:
        return self.report.num_running + self.report.num_waiting + self.num_assigned


class PipelineDirectory:
    """Records live from heartbeat to heartbeat."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        rng: Random,
        expiry_s: float = 5.0,
        choice: Literal["least_loaded", "two_choices"] = "least_loaded",
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._expiry_s = expiry_s
        self._choice = choice
        self._records: dict[PipelineId, PipelineRecord] = {}
        self._promotions: dict[str, Promotion] = {}
        """The latest for each configuration; they outlive who reported them."""

    def heartbeat(self, report: PipelineReport) -> None:
        """Joins, or says again that it is there and how busy it is."""
        if report.promotion is not None:
            self._note(report.promotion)
        self._records[report.pipeline_id] = PipelineRecord(report=report, heard_s=self._clock())

    def leave(self, pipeline_id: PipelineId) -> None:
        self._records.pop(pipeline_id, None)

    def expire(self) -> tuple[PipelineId, ...]:
        """Forgets the silent ones and names them."""
        deadline = self._clock() - self._expiry_s
        silent = tuple(i for i, record in self._records.items() if record.heard_s < deadline)
        for pipeline_id in silent:
            del self._records[pipeline_id]
        return silent

    def records(self) -> tuple[PipelineRecord, ...]:
        self.expire()
        return tuple(self._records.values())

    def promotion(self, in_place_of: str) -> Promotion | None:
        """What a new pipeline of this configuration is to draft with, when it is not that."""
        return self._promotions.get(in_place_of)

    def listed(self, app: str | None = None) -> tuple[Listed, ...]:
        """What the pipelines of one service have said last, and how long ago; None: of all."""
        now_s = self._clock()
        return tuple(
            Listed(report=record.report, age_s=now_s - record.heard_s)
            for record in self.records()
            if app in (None, record.report.app)
        )

    def choose(
        self, *, app: str | None = None, excluded: Collection[PipelineId] = ()
    ) -> PipelineReport:
        """The pipeline for one more request; `excluded` are those the caller has seen fail.

        Of one service; None: of all that this directory knows.

        `two_choices` takes the less busy of two drawn at random: nearly as even as looking at all
        of them, and steadier when many routers act on old reports.
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
                f"draining, unavailable, another service's or among the {len(excluded)} that just "
                "failed; try again in a moment"
            )
        if self._choice == "two_choices" and len(candidates) > 2:
            candidates = self._rng.sample(candidates, 2)
        return self._assign(self._least_loaded(candidates))

    def describe(self) -> list[dict[str, object]]:
        """Plain JSON, for an operator's eyes."""
        now_s = self._clock()
        return [
            asdict(record.report) | {"load": record.load, "silent_s": now_s - record.heard_s}
            for record in self.records()
        ]

    def _note(self, promotion: Promotion) -> None:
        known = self._promotions.get(promotion.in_place_of)
        if known is None or known.taken_unix_s < promotion.taken_unix_s:
            self._promotions[promotion.in_place_of] = promotion

    def _least_loaded(self, candidates: list[PipelineRecord]) -> PipelineRecord:
        least = min(record.load for record in candidates)
        return self._rng.choice([record for record in candidates if record.load == least])

    def _assign(self, record: PipelineRecord) -> PipelineReport:
        report = record.report
        self._records[report.pipeline_id] = replace(record, num_assigned=record.num_assigned + 1)
        return report


class IngressRoll:
    """Which ingresses ask for the pipelines, and which have ceased to.

    Silence is measured in time in which the roll itself was called. A process that stood still, or
    was starved, has heard nobody: of a long pause between two calls little counts. A new roll knows
    nobody and misses nobody.
    """

    def __init__(self, *, clock: Callable[[], float], expiry_s: float = 5.0) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._called_s = clock()
        self._turned_s = 0.0
        """Time so far without the long pauses."""
        self._heard_s: dict[str, float] = {}
        """When each was heard of last, in that time."""

    def heard(self, ingress: str) -> None:
        self._heard_s[ingress] = self._turn()

    def silent(self) -> frozenset[str]:
        """Those heard of before, and not for twice `expiry_s`; forgets who is silent for long."""
        now_s = self._turn()
        oldest_s = now_s - _KEPT_FOR * self._expiry_s
        self._heard_s = {i: heard_s for i, heard_s in self._heard_s.items() if heard_s >= oldest_s}
        latest_s = now_s - 2 * self._expiry_s
        return frozenset(i for i, heard_s in self._heard_s.items() if heard_s < latest_s)

    def _turn(self) -> float:
        now_s = self._clock()
        self._turned_s += min(now_s - self._called_s, self._expiry_s / 2)
        self._called_s = now_s
        return self._turned_s
