"""Evaluates the readings of a long run: what grows, and whether that is within its limit.

What a role holds is the sum over its processes, and one set of processes is one life: the slope
leaves out the step when a process is replaced, and the time in which a new process settles. Where a
role has several processes, the memory of each one that lives through is a figure of its own. Knows
neither processes nor Ray.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.endurance.load import Answers
from tests.endurance.processes import OTHER, RAYS_OWN, Holdings, Pid
from tests.endurance.slopes import Sample, Slope, slope_of

_MIB = 2**20
_MEMORY_LIMIT_MIB_PER_H = 1.0
_COUNT_LIMIT_PER_H = 4.0
"""One in a quarter of an hour, which is what a run of twenty minutes measures."""
_NUM_BLOCKS = 45
"""Of twenty seconds in a run of twenty minutes, longer than nearly all requests."""
_MIN_BLOCK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the service held at one time."""

    at_s: float
    """Since the load began."""
    unix_s: float
    processes: Mapping[Pid, Holdings]
    shared_memory_bytes: int
    num_actors: int

    def settled(self, role: str, settle_s: float) -> dict[Pid, Holdings]:
        """Returns the role's processes; none while one of them is younger than `settle_s`."""
        processes = {pid: held for pid, held in self.processes.items() if held.role == role}
        is_young = any(self.unix_s - pid.started_s < settle_s for pid in processes)
        return {} if is_young else processes


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReading:
    """How many pages were in use at a time without requests."""

    at_s: float
    pages_in_use: int


@dataclass(frozen=True, slots=True)
class _Quantity:
    name: str
    unit: str
    limit_per_h: float
    of: Callable[[Holdings], float]


_MEMORY = _Quantity("memory", "MiB", _MEMORY_LIMIT_MIB_PER_H, lambda held: held.memory_bytes / _MIB)
_QUANTITIES = (
    _MEMORY,
    _Quantity("handles", "", _COUNT_LIMIT_PER_H, lambda held: held.handles),
    _Quantity("sockets", "", _COUNT_LIMIT_PER_H, lambda held: held.sockets),
    _Quantity("threads", "", _COUNT_LIMIT_PER_H, lambda held: held.threads),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples of one figure."""

    name: str
    unit: str = ""
    limit_per_h: float = _COUNT_LIMIT_PER_H
    samples: Sequence[Sample]
    is_rays_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The growth of one figure, and whether that is within its limit."""

    name: str
    unit: str
    limit_per_h: float
    first: float
    last: float
    slope: Slope | None
    """None where the run was too short to tell."""
    is_rays_own: bool = False
    """Of processes without code of this project: reported, and no reason to fail."""

    @property
    def has_grown(self) -> bool:
        return self.slope is not None and not self.slope.is_below(self.limit_per_h)

    def as_json(self) -> dict[str, object]:
        row = asdict(self)
        slope = row.pop("slope") or {}
        verdict = {"passed": None if self.slope is None else not self.has_grown}
        return {
            key: round(cell, 4) if isinstance(cell, float) else cell
            for key, cell in (row | slope | verdict).items()
        }


def figures_of(
    readings: Sequence[Reading], idle: Sequence[IdleReading], *, warmup_s: float, settle_s: float
) -> list[Figure]:
    """Evaluates what came after the warm-up."""
    readings = [reading for reading in readings if reading.at_s >= warmup_s]
    idle = [reading for reading in idle if reading.at_s >= warmup_s]
    if not readings:
        return []
    block_s = max(_MIN_BLOCK_S, (readings[-1].at_s - warmup_s) / _NUM_BLOCKS)
    return [
        Figure(
            name=series.name,
            unit=series.unit,
            limit_per_h=series.limit_per_h,
            first=series.samples[0].value,
            last=series.samples[-1].value,
            slope=slope_of(series.samples, block_s=block_s),
            is_rays_own=series.is_rays_own,
        )
        for series in _all_series(readings, idle, settle_s)
        if series.samples
    ]


def _all_series(
    readings: Sequence[Reading], idle: Sequence[IdleReading], settle_s: float
) -> Iterator[Series]:
    for role in sorted({held.role for reading in readings for held in reading.processes.values()}):
        for quantity in _QUANTITIES:
            yield Series(
                name=f"{quantity.name} of {role}",
                unit=quantity.unit,
                limit_per_h=quantity.limit_per_h,
                samples=_sums(readings, role, quantity.of, settle_s),
                is_rays_own=role in RAYS_OWN,
            )
    for pid, held in _survivors_among_several(readings).items():
        samples = [(reading, reading.settled(held.role, settle_s).get(pid)) for reading in readings]
        yield Series(
            name=f"memory of {held.role}, pid {pid.number}",
            unit=_MEMORY.unit,
            limit_per_h=_MEMORY.limit_per_h,
            samples=[
                Sample(at_s=reading.at_s, life=pid, value=_MEMORY.of(holdings))
                for reading, holdings in samples
                if holdings is not None
            ],
        )
    yield Series(
        name="shared memory",
        unit="MiB",
        limit_per_h=_MEMORY_LIMIT_MIB_PER_H,
        samples=_of_service(
            [(reading.at_s, reading.shared_memory_bytes / _MIB) for reading in readings]
        ),
    )
    yield Series(
        name="actors",
        samples=_of_service([(reading.at_s, reading.num_actors) for reading in readings]),
    )
    yield Series(
        name="processes",
        samples=_of_service([(reading.at_s, len(reading.processes)) for reading in readings]),
    )
    yield Series(
        name="pages in use, idle",
        samples=_of_service([(reading.at_s, reading.pages_in_use) for reading in idle]),
    )


def _sums(
    readings: Sequence[Reading], role: str, of: Callable[[Holdings], float], settle_s: float
) -> list[Sample]:
    settled = [(reading.at_s, reading.settled(role, settle_s)) for reading in readings]
    return [
        Sample(at_s=at_s, life=frozenset(processes), value=sum(map(of, processes.values())))
        for at_s, processes in settled
        if processes
    ]


def _of_service(values: Sequence[tuple[float, float]]) -> list[Sample]:
    return [Sample(at_s=at_s, life="service", value=value) for at_s, value in values]


def _survivors_among_several(readings: Sequence[Reading]) -> dict[Pid, Holdings]:
    """Returns the processes that are in every reading, of roles with more than one."""
    first = readings[0].processes
    in_role = Counter(held.role for held in first.values() if held.role != OTHER)
    return {
        pid: held
        for pid, held in first.items()
        if in_role[held.role] > 1 and all(pid in reading.processes for reading in readings)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has found."""

    figures: Sequence[Figure]
    idle: Sequence[IdleReading]
    answers: Answers
    unnoticed: Sequence[int] = ()
    """Numbers of faults that the service did not notice in time."""
    ended_early: bool = False
    """Whether the service was not ready again in time after a fault."""


def growth_in_ray(outcome: Outcome) -> list[str]:
    """Returns what grows in Ray's own processes."""
    return [
        _complaint(figure) for figure in outcome.figures if figure.has_grown and figure.is_rays_own
    ]


def complaints(outcome: Outcome) -> list[str]:
    """Returns why the run proves nothing or failed; empty where everything is within its limit."""
    ours = [figure for figure in outcome.figures if not figure.is_rays_own]
    reasons = [_complaint(figure) for figure in ours if figure.has_grown]
    reasons += [f"{num} answers wrong: {kind}" for kind, num in outcome.answers.wrong.items()]
    if outcome.idle and outcome.idle[-1].pages_in_use:
        reasons.append(f"{outcome.idle[-1].pages_in_use} pages in use without a request")
    if not outcome.idle:
        reasons.append("the service was never idle: no page was counted")
    if not any(figure.slope for figure in outcome.figures):
        reasons.append("too short for any slope: give it more minutes")
    if outcome.unnoticed:
        reasons.append(f"the service did not notice faults {list(outcome.unnoticed)}")
    if outcome.ended_early:
        reasons.append("the faults ended early, since the service was not ready again in time")
    return reasons


def _complaint(figure: Figure) -> str:
    return f"{figure.name} grows: {_told(figure)}"


def table(outcome: Outcome, faults: Mapping[str, int]) -> str:
    """Returns the figures as text."""
    requests = ", ".join(f"{num} {kind}" for kind, num in sorted(outcome.answers.counts.items()))
    broken = ", ".join(f"{num} {kind}" for kind, num in sorted(faults.items()))
    return "\n".join(
        [
            f"requests: {requests}; {outcome.answers.num_tokens} tokens",
            f"faults: {broken or 'none'}",
            *(f"failed: {complaint}" for complaint in complaints(outcome)),
            *(f"in Ray's own processes: {growth}" for growth in growth_in_ray(outcome)),
            "",
            f"{'figure':44} {'first':>9} {'last':>9}   growth in an hour (95 %)",
            *(f"{f.name:44} {f.first:9.1f} {f.last:9.1f}   {_told(f)}" for f in outcome.figures),
        ]
    )


def _told(figure: Figure) -> str:
    if figure.slope is None:
        return "too short to tell"
    slope = figure.slope
    return (
        f"{slope.per_h:+.2f} {figure.unit} ({slope.low_per_h:+.2f} to {slope.high_per_h:+.2f})"
        f"{' GROWS' if figure.has_grown else ''}"
    )
