"""What was seen of a fleet over time: samples, decisions, and the ends of the phases."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

from eesd_dist.routing.fleet.departure import FleetState


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at_s: float
    num_clients: int
    """Streams that the load keeps up."""
    num_waiting: int
    wanted: int
    count: int
    """Pipelines that Serve has or starts."""
    ready: int
    draining: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    at_s: float
    wanted: int
    signal: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnd:
    name: str
    began_s: float
    ended_s: float


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Grows by one sample at a time; a decision is noted when it differs from the last one."""

    clock: Callable[[], float]
    samples: list[Sample] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    phases: list[PhaseEnd] = field(default_factory=list)

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    def note(self, state: FleetState, *, num_clients: int, nodes: int) -> None:
        time_s, decision = self.clock(), state.decision
        self.samples.append(
            Sample(
                at_s=time_s,
                num_clients=num_clients,
                num_waiting=state.num_waiting,
                wanted=decision.target,
                count=state.count,
                ready=state.num_ready,
                draining=state.num_draining,
                nodes=nodes,
            )
        )
        if not self.decisions or self.decisions[-1].reason != decision.reason:
            self.decisions.append(
                Decision(
                    at_s=time_s - decision.since_s,  # the router passes the age of its decision
                    wanted=decision.target,
                    signal=decision.signal,
                    reason=decision.reason,
                )
            )

    def decisions_in(self, phase: str) -> list[Decision]:
        """Returns the decisions made during a phase."""
        spans = [
            (phase_end.began_s, phase_end.ended_s)
            for phase_end in self.phases
            if phase_end.name == phase
        ]
        return [
            decision
            for decision in self.decisions
            if any(began_s <= decision.at_s <= ended_s for began_s, ended_s in spans)
        ]

    def as_json(self) -> dict[str, object]:
        """Returns plain JSON; of equal samples in a row the first, and the very last one."""
        return {
            "samples": [_rounded(asdict(sample)) for sample in _changed(self.samples)],
            "decisions": [_rounded(asdict(decision)) for decision in self.decisions],
            "phases": [_rounded(asdict(phase)) for phase in self.phases],
        }


def _changed(samples: Sequence[Sample]) -> list[Sample]:
    changed = [
        sample
        for before, sample in pairwise(samples)
        if replace(sample, at_s=0.0) != replace(before, at_s=0.0)
    ]
    return [*samples[:1], *changed, *samples[-1:]]


def _rounded(row: dict[str, object]) -> dict[str, object]:
    return {
        key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()
    }
