"""Draws the pictures of a comparison of controllers.

Chooses texts and variants to show; `plots` draws them.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random

from eesd_dist.bench.charts.plots import (
    Band,
    Line,
    draw_lengths,
    draw_loads,
    draw_posterior,
    draw_regret,
    draw_reliability,
    lines_of,
)
from eesd_dist.bench.judging import ChangeOfClass, Findings, Judge, Rates
from eesd_dist.bench.live import PLAIN, Race
from eesd_dist.bench.replay import lengths_by_position
from eesd_dist.control.belief import Belief

_SHOWN = ("goodput", "calibration", "beta", "smartspec")
_BEST = "best fixed length of each load"
_DRAWS = 400
_RECENT = 12
"""Rounds of the observed acceptance that is plotted with a posterior."""


def draw_all(
    folder: Path, judge: Judge, findings: Findings, live: Mapping[int, Race]
) -> list[Path]:
    """Draws every picture into a folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        name: folder / f"control-{name}.png"
        for name in ("posterior", "lengths", "regret", "change", "load", "reliability")
    }
    _posterior(files["posterior"], findings.change)
    _lengths(files["lengths"], judge, findings)
    _regret(files["regret"], findings)
    _change(files["change"], findings.change)
    _loads(files["load"], findings, live)
    forecast = findings.reliability
    draw_reliability(files["reliability"], forecast.bins, error=forecast.error)
    return list(files.values())


def _posterior(file: Path, change: ChangeOfClass) -> None:
    """Draws Beta-TS over the stream that changes class."""
    run = change.runs["beta"]
    rng = Random(0)
    belief = Belief()
    rows: list[tuple[float, float, float]] = []
    judged: list[tuple[int, int]] = []
    observed: list[float] = []
    for outcome in run.outcomes:
        belief = belief.after(outcome, discount=change.discount)
        draws = sorted(rng.betavariate(belief.alpha, belief.beta) for _ in range(_DRAWS))
        rows.append((belief.mean, draws[_DRAWS // 20], draws[-_DRAWS // 20]))
        judged.append((outcome.num_accepted, min(outcome.num_drafted, outcome.num_accepted + 1)))
        accepted, tested = (sum(column) for column in zip(*judged[-_RECENT:], strict=True))
        observed.append(accepted / tested if tested else 0.0)
    changes = [
        (next(i for i, (turn,) in enumerate(run.rounds, start=1) if turn.at >= start), name)
        for start, name in change.parts()
    ]
    rounds = range(1, len(rows) + 1)
    draw_posterior(
        file,
        Band(
            rounds=rounds,
            mean=[mean for mean, _, _ in rows],
            low=[low for _, low, _ in rows],
            high=[high for _, _, high in rows],
        ),
        observed=Line(label=f"observed, last {_RECENT} rounds", x=rounds, y=observed),
        changes=changes,
    )


def _lengths(file: Path, judge: Judge, findings: Findings) -> None:
    """Draws the lengths on the first text of the first class: the clairvoyant, the best fixed
    length, and the controllers."""
    workload = next(iter(findings.by_class))
    trace = judge.traces_of(workload)[0]
    best = judge.clairvoyant(trace)
    at = 0
    x: list[float] = []
    y: list[float] = []
    while at < len(trace):
        x.append(float(at))
        y.append(float(best.lengths[at]))
        at = trace.after(at, best.lengths[at])
    lines = [Line(label="clairvoyant", x=x, y=y, is_reference=True)]
    for variant in judge.adaptive:
        if variant.label in _SHOWN[:2]:
            drafted = lengths_by_position(judge.alone(trace, variant))
            lines.append(
                Line(
                    label=variant.label,
                    x=[float(i) for i in drafted],
                    y=[float(length) for length in drafted.values()],
                )
            )
    draw_lengths(file, lines)


def _regret(file: Path, findings: Findings) -> None:
    """Draws the regret of the first class."""
    workload, curves = next(iter(findings.curves.items()))
    best = findings.by_class[workload][1].best_fixed
    shown = [label for label in (*_SHOWN, best) if label in curves]
    draw_regret(
        file,
        lines_of(
            {label: [1e3 * lost for lost in curves[label].lost_s] for label in shown},
            references=[best],
        ),
        title=f"{workload}, one request at a time, cold; mean over its texts",
    )


def _change(file: Path, change: ChangeOfClass) -> None:
    best = max(change.fixed, key=lambda label: change.runs[label].tokens_per_s)
    shown = [label for label in (*_SHOWN, best) if label in change.runs]
    lines = []
    for label in shown:
        total = 0.0
        x: list[float] = []
        y: list[float] = []
        for lost, (turn,) in zip(change.lost(label), change.runs[label].rounds, strict=True):
            total += 1e3 * lost
            x.append(float(turn.at))
            y.append(total)
        lines.append(Line(label=label, x=x, y=y, is_reference=label == best))
    seams = ", ".join(f"{name} from {start}" for start, name in change.parts())
    draw_regret(file, lines, title=f"one stream: {seams}", x="token")


def _loads(file: Path, findings: Findings, live: Mapping[int, Race]) -> None:
    """Draws rates by load: live figures if there are any, else replayed ones."""
    over_plain: dict[int, dict[str, float]] = (
        {load: _live_over_plain(race) for load, race in live.items()}
        if live
        else {load: _replayed_over_plain(rates) for load, rates in findings.by_load.items()}
    )
    shown = [name for name in (*_SHOWN, _BEST) if all(name in row for row in over_plain.values())]
    lines = [
        Line(
            label=label,
            x=[float(load) for load in over_plain],
            y=[row[label] for row in over_plain.values()],
            is_reference=label == _BEST,
        )
        for label in shown
    ]
    draw_loads(file, lines, title="live" if live else "replayed")


def _live_over_plain(race: Race) -> dict[str, float]:
    rows = {label: race.ratio(label, PLAIN.label) for label in race.labels}
    return rows | {_BEST: max(rows[label] for label in race.fixed)}


def _replayed_over_plain(rates: Rates) -> dict[str, float]:
    plain = rates.by_label[PLAIN.label]
    rows = {label: rate / plain for label, rate in rates.by_label.items()}
    return rows | {_BEST: rows[rates.best_fixed]}
