"""Report of `eesd bench control`: rows, ratios, and a summary with targets.

Pure functions of the measurements.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eesd_dist.bench.judging import Findings, Rates, tree_variants
from eesd_dist.bench.live import PLAIN, Race
from eesd_dist.bench.round_breakdown import STAGES, ms_per_round, without_prefill

CONTENDERS = ("goodput", "beta", "calibration")
"""Controllers in the summary; the first one is this project's."""
TARGETS = {
    "over_best_fixed_per_class": 0.98,
    "over_best_single_fixed_mixed": 1.08,
    "worst_load_over_plain": 0.98,
}
"""Targets of `goodput`, printed next to the measurements."""


@dataclass(slots=True, kw_only=True)
class LiveRaces:
    """Results of the live section."""

    by_class: dict[str, Race] = field(default_factory=dict)
    mixed: Race
    by_load: dict[int, Race] = field(default_factory=dict)
    trees: dict[str, Race] = field(default_factory=dict)
    """Chains against trees, by load or class."""

    @property
    def all(self) -> list[Race]:
        return [
            *self.by_class.values(),
            self.mixed,
            *self.by_load.values(),
            *self.trees.values(),
        ]

    def as_json(self) -> dict[str, object]:
        return {
            "by_class": {name: _race_row(race) for name, race in self.by_class.items()},
            "mixed": _race_row(self.mixed),
            "by_load": {str(load): _race_row(race) for load, race in self.by_load.items()},
            "trees": {name: _race_row(race) for name, race in self.trees.items()},
        }


def _race_row(race: Race) -> dict[str, object]:
    best = race.best_fixed
    rows: dict[str, object] = {}
    for label in race.labels:
        passes = [block[label] for block in race.blocks]
        rounds = race.rounds(label)
        drafted = sum(run.drafted for run in passes)
        plain, fixed = race.interval(label, PLAIN.label), race.interval(label, best)
        rows[label] = {
            "tokens_per_s": round(race.rate(label), 1),
            "over_plain": round(race.ratio(label, PLAIN.label), 3),
            "over_plain_90": [round(plain.low, 3), round(plain.high, 3)],
            "over_plain_median": round(race.median_ratio(label, PLAIN.label), 3),
            "over_best_fixed": round(race.ratio(label, best), 3),
            "over_best_fixed_median": round(race.median_ratio(label, best), 3),
            "over_best_fixed_90": [round(fixed.low, 3), round(fixed.high, 3)],
            "tokens_per_round": round(sum(run.tokens for run in passes) / len(rounds), 2),
            "drafted_per_token": round(drafted / sum(run.tokens for run in passes), 2),
            "acceptance": round(sum(run.accepted for run in passes) / drafted, 3)
            if drafted
            else None,
            "ms_per_round": ms_per_round(without_prefill(rounds)),
        }
    return {
        "best_fixed": best,
        "blocks": len(race.blocks),
        "largest_batch": max(run.largest_batch for block in race.blocks for run in block.values()),
        "texts_unlike_plain": race.texts_unlike_plain,
        "variants": rows,
    }


def summary_of(findings: Findings | None, races: LiveRaces | None) -> dict[str, Any]:
    """Returns the three ratios of each contender, live if there was a live section."""
    rows = {
        name: _live_ratios(races, name) if races is not None else _replayed_ratios(findings, name)
        for name in CONTENDERS
    }
    first = rows.pop("goodput")
    summary: dict[str, Any] = {
        "goodput_over_best_fixed_per_class": first["over_best_fixed_per_class"],
        "goodput_over_best_single_fixed_mixed": first["over_best_single_fixed_mixed"],
        "worst_load_over_plain": first["worst_load_over_plain"],
    }
    summary |= rows
    summary["texts_unlike_plain"] = (
        sum(race.texts_unlike_plain for race in races.all) if races is not None else None
    )
    if races is not None:
        summary["tree_over_chain"] = _tree_over_chain(races.trees)
    summary["basis"] = "live" if races is not None else "replay"
    summary["targets"] = TARGETS
    return summary


def _live_ratios(races: LiveRaces, name: str) -> dict[str, Any]:
    def over_best(race: Race) -> float:
        return round(race.ratio(name, race.best_fixed), 3)

    return {
        "over_best_fixed_per_class": {
            workload: over_best(race) for workload, race in races.by_class.items()
        },
        "over_best_single_fixed_mixed": over_best(races.mixed),
        "worst_load_over_plain": round(
            min(race.ratio(name, PLAIN.label) for race in races.by_load.values()), 3
        ),
    }


def live_over_replay(
    races: LiveRaces | None, findings: Findings | None
) -> dict[str, dict[str, float]] | None:
    """Returns measured over replayed speed-ups per class: the accuracy of the cost model."""
    if races is None or findings is None:
        return None
    return {
        workload: {
            label: round(race.ratio(label, PLAIN.label) / rates[label] * rates[PLAIN.label], 3)
            for label in race.labels
            if label != PLAIN.label
        }
        for workload, race in races.by_class.items()
        for rates in [findings.by_class[workload][1].by_label]
    }


def _tree_over_chain(races: Mapping[str, Race]) -> dict[str, dict[str, float]]:
    return {
        name: {
            variant.label: round(race.ratio(variant.label, str(variant.controller)), 3)
            for variant in tree_variants()
            if variant.tree != "none"
        }
        for name, race in races.items()
    }


def _replayed_ratios(findings: Findings | None, name: str) -> dict[str, Any]:
    assert findings is not None

    def over(rates: Rates, label: str) -> float:
        return round(rates.by_label[name] / rates.by_label[label], 3)

    return {
        "over_best_fixed_per_class": {
            workload: over(loads[1], loads[1].best_fixed)
            for workload, loads in findings.by_class.items()
        },
        "over_best_single_fixed_mixed": over(findings.mixed, findings.mixed.best_fixed),
        "worst_load_over_plain": min(
            over(rates, PLAIN.label) for rates in findings.by_load.values()
        ),
    }


def class_line(name: str, race: Race) -> str:
    best = race.best_fixed
    shares = ", ".join(
        f"{label} {race.ratio(label, best):.3f} [{i.low:.2f} {i.high:.2f}]"
        for label in race.labels
        if label not in race.fixed
        for i in [race.interval(label, best)]
    )
    return f"{name:20} {best} {race.ratio(best, PLAIN.label):.2f}x plain; over it: {shares}"


def load_line(name: str, race: Race) -> str:
    shares = ", ".join(
        f"{label} {race.ratio(label, PLAIN.label):.3f} [{i.low:.2f} {i.high:.2f}]"
        for label in race.labels
        if label != PLAIN.label
        for i in [race.interval(label, PLAIN.label)]
    )
    return f"{name:20} over plain: {shares}"


def rounds_lines(race: Race) -> list[str]:
    """Returns where the time of a round goes, for plain decoding and `goodput`."""
    lines: list[str] = []
    for label in (PLAIN.label, CONTENDERS[0]):
        times_ms = ms_per_round(without_prefill(race.rounds(label)))
        breakdown = ", ".join(f"{stage} {times_ms[stage]:.2f}" for stage in STAGES if times_ms)
        lines.append(f"{'':20} {label}, ms a round: {breakdown}")
    return lines


def say_replay(findings: Findings, say: Callable[[str], None]) -> None:
    say("replayed, over the best fixed length:")
    rows: dict[str, Rates] = {name: loads[1] for name, loads in findings.by_class.items()}
    rows["mixed traffic"] = findings.mixed
    for name, rates in rows.items():
        best = rates.by_label[rates.best_fixed]
        shares = ", ".join(
            f"{label} {rate / best:.3f}"
            for label, rate in rates.by_label.items()
            if label not in rates.fixed
        )
        say(f"  {name:18} {rates.best_fixed}; {shares}; oracle {rates.oracle / best:.2f}")


def say_summary(summary: Mapping[str, Any], say: Callable[[str], None]) -> None:
    rows = {
        "goodput": {
            "over_best_fixed_per_class": summary["goodput_over_best_fixed_per_class"],
            "over_best_single_fixed_mixed": summary["goodput_over_best_single_fixed_mixed"],
            "worst_load_over_plain": summary["worst_load_over_plain"],
        }
    } | {name: summary[name] for name in CONTENDERS if name in summary}
    for name, row in rows.items():
        for figure, target in TARGETS.items():
            value = row[figure]
            if isinstance(value, Mapping):
                value = min(value.values())
            say(f"{name:12} {figure:30} {value:.3f}   target >= {target}")
    say(f"texts unlike plain decoding: {summary['texts_unlike_plain']}")
