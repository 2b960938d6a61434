"""Compares controllers on replayed traces: by class, by load, after a change, cold and warm.

Seconds come from a measured cost model, everything else from recorded rounds, so that the same
traces give the same figures on every machine. Does not depend on the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from eesd_dist.bench.crowds import BURSTS, Crowd, Guest, in_turn, mixed
from eesd_dist.bench.live import PLAIN
from eesd_dist.bench.replay import (
    Clairvoyant,
    Replayed,
    Replayer,
    ReplaySetting,
    Variant,
    accepted_length,
    replay,
)
from eesd_dist.bench.traces import Trace, TraceSet, joined
from eesd_dist.control.calibrator import (
    Calibrator,
    equal_mass_calibration_error,
    expected_calibration_error,
    judged_tokens,
    reliability_table,
)
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.control.regret import hindsight
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.types import RequestId, TreeShape

_FIRST_ROUNDS = 8
"""Number of rounds by which a cold start or a change of class is judged."""


def fixed_variants(max_draft_tokens: int) -> list[Variant]:
    """Returns all fixed lengths; plain decoding is the fixed length 0."""
    return [
        PLAIN,
        *(
            Variant(label=f"fixed {length}", controller="fixed", max_draft_tokens=length)
            for length in range(1, max_draft_tokens + 1)
        ),
    ]


def adaptive_variants() -> list[Variant]:
    """Returns every controller of the exit head with the service's settings."""
    names = [name for name in CONTROLLER_NAMES if name not in ("fixed", "ngram")]
    return [Variant(label=name, controller=name) for name in names]


def other_forms() -> list[Variant]:
    """Returns variants by settings of the engine, not of a request: replayed only."""
    return [
        Variant(label="beta, theta per token", controller="beta", settings=(("redraw", "token"),)),
        Variant(label="beta, coin", controller="beta", settings=(("stop_rule", "bernoulli"),)),
    ]


def tree_variants() -> list[Variant]:
    """Returns the same controllers with chains and trees; live only."""
    shapes: dict[TreeShape, str] = {
        "none": "",
        "static": ", static tree",
        "dynamic": ", dynamic tree",
    }
    return [
        Variant(label=f"{name}{suffix}", controller=name, tree=shape)
        for name in ("goodput", "calibration")
        for shape, suffix in shapes.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second of every variant on the same work."""

    by_label: Mapping[str, float]
    oracle: float
    fixed: tuple[str, ...]

    @property
    def best_fixed(self) -> str:
        return max(self.fixed, key=lambda label: self.by_label[label])

    def fixed_in_order(self) -> list[str]:
        """Returns the fixed lengths, the fastest first."""
        return sorted(self.fixed, key=lambda label: -self.by_label[label])

    def as_json(self) -> dict[str, object]:
        best, plain = self.by_label[self.best_fixed], self.by_label[PLAIN.label]
        return {
            "best_fixed": self.best_fixed,
            "variants": {
                label: {
                    "tokens_per_s": round(rate, 2),
                    "over_plain": round(rate / plain, 3),
                    "over_best_fixed": round(rate / best, 3),
                    "regret_to_oracle": round(1.0 - rate / self.oracle, 3),
                }
                for label, rate in self.by_label.items()
            },
            "oracle": {
                "tokens_per_s": round(self.oracle, 2),
                "over_plain": round(self.oracle / plain, 3),
                "over_best_fixed": round(self.oracle / best, 3),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds lost against the clairvoyant, cumulative over the rounds of one text."""

    lost_s: tuple[float, ...]

    @staticmethod
    def mean_of(curves: Sequence["Curve"]) -> "Curve":
        """Returns the mean by round; a text that has ended stays at its last value."""
        longest = max(len(curve.lost_s) for curve in curves)
        return Curve(
            lost_s=tuple(
                sum(curve.lost_s[min(i, len(curve.lost_s) - 1)] for curve in curves) / len(curves)
                for i in range(longest)
            )
        )

    def as_json(self) -> list[float]:
        """Returns the curve in milliseconds."""
        return [round(1e3 * lost, 3) for lost in self.lost_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOfClass:
    """Request with a text that changes from an easy class to a hard one and back."""

    stream: Trace
    seams: tuple[int, ...]
    """Positions where the class changes."""
    classes: tuple[str, ...]
    runs: Mapping[str, Replayed]
    clairvoyant: Clairvoyant
    fixed: tuple[str, ...]
    discount: float
    """Discount of the beliefs per round."""

    def parts(self) -> list[tuple[int, str]]:
        """Returns the position and name of each class in the text."""
        return list(zip([0, *self.seams], self.classes, strict=True))

    def lost(self, label: str) -> list[float]:
        return self.clairvoyant.regret(self.runs[label], self.stream)

    def as_json(self) -> dict[str, object]:
        best = max(self.fixed, key=lambda label: self.runs[label].tokens_per_s)
        return {
            "classes": list(self.classes),
            "best_fixed": best,
            "variants": {
                label: {
                    "over_best_fixed": round(run.tokens_per_s / self.runs[best].tokens_per_s, 3),
                    "lost_ms_per_round": self._lost_by_part(label),
                }
                for label, run in self.runs.items()
            },
        }

    def _lost_by_part(self, label: str) -> list[dict[str, float]]:
        """Returns the loss in each part of the stream: in its first rounds, and in later ones."""
        segments: list[list[float]] = [[] for _ in self.classes]
        for lost, (turn,) in zip(self.lost(label), self.runs[label].rounds, strict=True):
            segments[sum(turn.at >= seam for seam in self.seams)].append(lost)
        return [
            {"first": _mean_ms(segment[:_FIRST_ROUNDS]), "later": _mean_ms(segment[_FIRST_ROUNDS:])}
            for segment in segments
        ]


def _mean_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * sum(seconds) / len(seconds), 3) if seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """The calibrator's forecast and the verdict of each judged token."""

    forecasts: tuple[tuple[float, bool], ...]

    @property
    def error(self) -> float:
        return expected_calibration_error(self.forecasts)

    @property
    def bins(self) -> list[tuple[int, float, float]]:
        """Number of tokens, mean forecast and accepted share of each bin."""
        return [
            (row.num_judged, row.mean_forecast, row.accepted_share)
            for row in reliability_table(self.forecasts)
        ]

    def as_json(self) -> dict[str, object]:
        return {
            "judged": len(self.forecasts),
            "expected_calibration_error": round(self.error, 4),
            "equal_mass_error": round(equal_mass_calibration_error(self.forecasts), 4),
            "bins": [
                [count, round(forecast, 4), round(share, 4)] for count, forecast, share in self.bins
            ],
        }


@dataclass(slots=True, kw_only=True)
class Findings:
    """Results of the replay section of the report."""

    by_class: dict[str, dict[int, Rates]] = field(default_factory=dict)
    """Rates by class and load."""
    by_load: dict[int, Rates] = field(default_factory=dict)
    """Rates of all classes together, by load."""
    mixed: Rates
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    from_logs: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Regret by class and variant, as `control.regret` estimates it from the log of the run."""
    change: ChangeOfClass
    priors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    reliability: Reliability

    def as_json(self) -> dict[str, object]:
        return {
            "by_class": {
                workload: {str(load): rates.as_json() for load, rates in loads.items()}
                for workload, loads in self.by_class.items()
            },
            "by_load": {str(load): rates.as_json() for load, rates in self.by_load.items()},
            "mixed": self.mixed.as_json(),
            "lost_ms_by_round": {
                workload: {label: curve.as_json() for label, curve in curves.items()}
                for workload, curves in self.curves.items()
            },
            "regret_from_logs": self.from_logs,
            "change_of_class": self.change.as_json(),
            "priors": self.priors,
            "reliability": self.reliability.as_json(),
        }


class Judge:
    """Replays one set of traces through all variants."""

    def __init__(self, traces: TraceSet, setting: ReplaySetting, *, seed: int) -> None:
        self._set = traces
        self._traces = traces.traces
        self._setting = setting
        self._seed = seed
        self._ceiling = traces.max_draft_tokens
        self.fixed = fixed_variants(self._ceiling)
        self.adaptive = adaptive_variants()

    def traces_of(self, workload: str) -> list[Trace]:
        return self._set.by_workload()[workload]

    @property
    def all_variants(self) -> list[Variant]:
        return [*self.fixed, *self.adaptive, *other_forms()]

    def findings(
        self,
        *,
        loads: Sequence[int],
        loads_of_classes: Sequence[int],
        max_tokens: int,
        bursts: Sequence[int] = BURSTS,
    ) -> Findings:
        """Makes all comparisons. `bursts`: those of mixed traffic."""
        groups = self._set.by_workload()
        by_class: dict[str, dict[int, Rates]] = {}
        for workload, traces in groups.items():
            by_class[workload] = {load: self.class_rates(traces, load) for load in loads_of_classes}
        by_load = {load: self.load_rates(load) for load in loads}
        findings = Findings(
            by_class=by_class,
            by_load=by_load,
            mixed=self.mixed_rates(max_tokens, bursts),
            change=self.change_of_class(),
            reliability=self.reliability(),
        )
        for workload, traces in groups.items():
            findings.curves[workload] = self.curves(traces)
            findings.from_logs[workload] = self.from_logs(traces)
            findings.priors[workload] = self.priors(traces)
        return findings

    def class_rates(self, traces: Sequence[Trace], load: int) -> Rates:
        """Returns rates of one class with `load` requests at once, or one after the other for 1."""
        if load == 1:
            crowds: list[Crowd] = [(Guest(text=text),) for text in range(len(traces))]
        else:
            crowds = [tuple(Guest(text=at % len(traces)) for at in range(load))]
        return self._rates(traces, crowds)

    def load_rates(self, load: int) -> Rates:
        rng = Random(self._seed + load)
        repeats = max(1, 2 // load)
        crowds = [in_turn(len(self._traces), load, rng=rng) for _ in range(repeats)]
        return self._rates(self._traces, crowds)

    def mixed_rates(self, max_tokens: int, bursts: Sequence[int]) -> Rates:
        crowd = mixed(
            len(self._traces), max_tokens=max_tokens, rng=Random(self._seed), bursts=bursts
        )
        return self._rates(self._traces, [crowd])

    def _rates(self, traces: Sequence[Trace], crowds: Sequence[Crowd]) -> Rates:
        return Rates(
            by_label={
                variant.label: self._rate(traces, crowds, variant) for variant in self.all_variants
            },
            oracle=_rate(
                [
                    replay(
                        traces,
                        self.fixed[-1],
                        self._setting,
                        crowd=crowd,
                        lengths=accepted_length,
                    )
                    for crowd in crowds
                ]
            ),
            fixed=tuple(variant.label for variant in self.fixed),
        )

    def _rate(self, traces: Sequence[Trace], crowds: Sequence[Crowd], variant: Variant) -> float:
        """Returns the rate over all crowds in order; beliefs carry over from earlier crowds."""
        engine = self._engine(variant)
        return _rate(
            [
                engine.run(traces, crowd, tag=f"{self._seed}-{number}")
                for number, crowd in enumerate(crowds)
            ]
        )

    def _engine(self, variant: Variant) -> Replayer:
        return Replayer(variant, self._setting, book=BeliefBook())

    def alone(self, trace: Trace, variant: Variant) -> Replayed:
        """Replays one request on a cold engine."""
        return replay([trace], variant, self._setting, tag=f"{trace.seed}")

    def clairvoyant(self, trace: Trace) -> Clairvoyant:
        return Clairvoyant.of(trace, cost=self._setting.cost, ceiling=self._ceiling)

    def curves(self, traces: Sequence[Trace]) -> dict[str, Curve]:
        """Returns regret by round of cold engines, as the mean over the class's texts."""
        best = [self.clairvoyant(trace) for trace in traces]
        return {
            variant.label: Curve.mean_of(
                [
                    Curve(
                        lost_s=tuple(accumulate(schedule.regret(self.alone(trace, variant), trace)))
                    )
                    for schedule, trace in zip(best, traces, strict=True)
                ]
            )
            for variant in self.all_variants
        }

    def from_logs(self, traces: Sequence[Trace]) -> dict[str, dict[str, float]]:
        """Returns regret that a service could estimate from its log of rounds."""
        rows: dict[str, dict[str, float]] = {}
        for variant in self.adaptive:
            outcomes = [o for trace in traces for o in self.alone(trace, variant).outcomes]
            seen = hindsight(outcomes, cost=self._setting.cost, max_length=self._ceiling)
            rows[variant.label] = {
                "oracle_regret": round(seen.oracle_regret, 3),
                "over_best_fixed": round(seen.over_best_fixed, 3),
                "best_fixed_length": seen.best_fixed_length,
            }
        return rows

    def change_of_class(self) -> ChangeOfClass:
        """Replays a text of an easy, a hard and an easy class: those with the longest and the
        shortest accepted drafts."""
        groups = sorted(self._set.by_workload().items(), key=lambda item: _ease(item[1]))
        hard, easy = groups[0], groups[-1]
        segments = [easy[1], hard[1], easy[1]]
        ends = list(accumulate(sum(len(trace) for trace in segment) for segment in segments))
        stream = joined([trace for segment in segments for trace in segment])
        return ChangeOfClass(
            stream=stream,
            seams=tuple(ends[:-1]),
            classes=(easy[0], hard[0], easy[0]),
            runs={variant.label: self.alone(stream, variant) for variant in self.all_variants},
            clairvoyant=self.clairvoyant(stream),
            fixed=tuple(variant.label for variant in self.fixed),
            discount=self._setting.speculation.discount,
        )

    def priors(self, traces: Sequence[Trace]) -> dict[str, dict[str, float]]:
        """Compares the second half of the class's texts cold and warmed by the first half."""
        half = len(traces) // 2
        taught, judged = traces[:half] or traces, traces[half:]
        rows: dict[str, dict[str, float]] = {}
        for variant in self.adaptive:
            cold = [self.alone(trace, variant) for trace in judged]
            warm = [self._warmed(trace, variant, taught) for trace in judged]
            rows[variant.label] = {
                "warm_over_cold": round(_rate(warm) / _rate(cold), 3),
                "warm_over_cold_first_rounds": round(
                    _first_rate(warm, judged) / _first_rate(cold, judged), 3
                ),
            }
        return rows

    def _warmed(self, trace: Trace, variant: Variant, taught: Sequence[Trace]) -> Replayed:
        """Replays one text on an engine that has served the `taught` texts only, so that judged
        texts do not warm each other."""
        engine = self._engine(variant)
        for number, text in enumerate(taught):
            engine.run([text], tag=f"taught-{number}")
        return engine.run([trace], tag=f"{trace.seed}")

    def reliability(self) -> Reliability:
        """Returns forecast and verdict of every judged token at every position."""
        calibrator = self._setting.calibrator or Calibrator()
        outcomes = [
            trace.outcome(RequestId("all"), at, self._ceiling)
            for trace in self._traces
            for at in range(len(trace))
        ]
        return Reliability(
            forecasts=tuple(
                (calibrator.probability(seen), accepted)
                for seen, accepted in judged_tokens(outcomes)
            )
        )


def _rate(runs: Sequence[Replayed]) -> float:
    return sum(run.tokens for run in runs) / sum(run.total_s for run in runs)


def _first_rate(runs: Sequence[Replayed], traces: Sequence[Trace]) -> float:
    tokens, seconds = 0, 0.0
    for run, trace in zip(runs, traces, strict=True):
        for took, (turn,) in list(zip(run.seconds, run.rounds, strict=True))[:_FIRST_ROUNDS]:
            seconds += took
            tokens += trace.after(turn.at, turn.outcome.num_drafted) - turn.at
    return tokens / seconds


def _ease(traces: Sequence[Trace]) -> float:
    """Returns the mean number of accepted tokens, over all positions."""
    accepted = [guess.num_accepted for trace in traces for guess in trace.guesses]
    return sum(accepted) / len(accepted)
