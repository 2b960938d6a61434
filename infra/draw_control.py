"""Draws pictures of controllers from a recording of `eesd bench control`.

    eesd bench control --record traces.json --json > report.json
    python infra/draw_control.py --traces traces.json --report report.json --folder pictures

The recording is replayed. Live figures, where the report has some, are in the picture of loads.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eesd_dist.bench.judging import ChangeOfClass, Findings, Judge, Rates
from eesd_dist.bench.live import PLAIN
from eesd_dist.bench.replay import ReplaySetting, lengths_by_position
from eesd_dist.bench.traces import TraceSet
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.command_line import run_command
from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.statistics import percentile

_LOADS = (1, 2, 4, 8, 16, 32)
_SIZE = (7.2, 3.6)
_DPI = 100
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5ea2", "#e08e1a", "#4d4d4d", "#17a2a2", "#a0522d")
_SHOWN = ("goodput", "calibration", "beta", "smartspec")
_BEST = "best fixed length of each load"
_DRAWS = 400
_RECENT = 12
"""Rounds of the observed acceptance that is plotted with a posterior."""


def draw_all(
    folder: Path, judge: Judge, findings: Findings, live: Mapping[int, Mapping[str, float]]
) -> None:
    """Draws every picture into a folder, which is created if missing. `live`: speed over plain by
    load and variant, if it was measured."""
    folder.mkdir(parents=True, exist_ok=True)

    def file(name: str) -> Path:
        return folder / f"control-{name}.png"

    _posterior(file("posterior"), findings.change)
    _lengths(file("lengths"), judge, findings)
    _regret(file("regret"), findings)
    _change(file("change"), findings.change)
    _loads(file("load"), findings, live)
    forecast = findings.reliability
    draw_reliability(file("reliability"), forecast.bins, error=forecast.error)


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
        draws = [rng.betavariate(belief.alpha, belief.beta) for _ in range(_DRAWS)]
        rows.append((belief.mean, percentile(draws, 0.05), percentile(draws, 0.95)))
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


def _loads(file: Path, findings: Findings, live: Mapping[int, Mapping[str, float]]) -> None:
    """Draws rates by load: live figures if there are any, else replayed ones."""
    over_plain = live or {
        load: _replayed_over_plain(rates) for load, rates in findings.by_load.items()
    }
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


def live_over_plain(report: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Returns speed over plain decoding by load and variant; empty without a live section."""
    by_load = (report["live"] or {"by_load": {}})["by_load"]
    rows: dict[int, dict[str, float]] = {}
    for load, race in by_load.items():
        variants = race["variants"]
        ratios = {label: variant["over_plain"] for label, variant in variants.items()}
        rows[int(load)] = ratios | {_BEST: ratios[race["best_fixed"]]}
    return rows


def _replayed_over_plain(rates: Rates) -> dict[str, float]:
    plain = rates.by_label[PLAIN.label]
    rows = {label: rate / plain for label, rate in rates.by_label.items()}
    return rows | {_BEST: rows[rates.best_fixed]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_reference: bool = False
    """True to draw it grey and dashed: oracle, plain decoding, best fixed length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A posterior by round: its mean and its middle 90 %."""

    rounds: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw_posterior(
    file: Path, band: Band, *, observed: Line, changes: Sequence[tuple[int, str]]
) -> None:
    """Draws one request's belief by round, and where its text changes class."""
    with _axes(file, "round", "chance of acceptance") as axes:
        axes.fill_between(
            band.rounds,
            band.low,
            band.high,
            color=_COLOURS[0],
            alpha=0.25,
            linewidth=0,
            label="posterior, middle 90 %",
        )
        axes.plot(band.rounds, band.mean, color=_COLOURS[0], label="posterior mean")
        _plot(axes, observed, _COLOURS[1])
        for start, name in changes:
            axes.axvline(start, color="0.6", linewidth=0.8)
            axes.text(start + 0.5, 0.02, name, fontsize=8, color="0.35")
        axes.set_ylim(0.0, 1.0)
        axes.legend(fontsize=8, loc="upper right", ncols=3)


def draw_lengths(file: Path, lines: Sequence[Line]) -> None:
    """Draws draft lengths by position in one text, for each controller and the clairvoyant."""
    with _axes(file, "position in the text", "drafted tokens") as axes:
        for number, line in enumerate(lines):
            colour = "0.55" if line.is_reference else _COLOURS[number % len(_COLOURS)]
            axes.step(line.x, line.y, where="post", color=colour, linewidth=1.3, label=line.label)
            axes.plot(line.x, line.y, ".", color=colour, markersize=4)
        axes.legend(fontsize=8, ncols=3)


def draw_regret(file: Path, lines: Sequence[Line], *, title: str, x: str = "round") -> None:
    """Draws the cumulative milliseconds lost against the clairvoyant."""
    with _axes(file, x, "lost so far, ms") as axes:
        for number, line in enumerate(lines):
            _plot(axes, line, _COLOURS[number % len(_COLOURS)])
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0.0)
        axes.legend(fontsize=8)


def draw_loads(file: Path, lines: Sequence[Line], *, title: str) -> None:
    """Draws tokens per second over plain decoding, by load."""
    with _axes(file, "requests at once", "times plain decoding") as axes:
        for number, line in enumerate(lines):
            _plot(axes, line, _COLOURS[number % len(_COLOURS)], marker=".")
        axes.axhline(1.0, color="0.3", linewidth=0.8)
        axes.set_xscale("log", base=2)
        loads = sorted({x for line in lines for x in line.x})
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8)


def draw_reliability(file: Path, bins: Sequence[tuple[int, float, float]], *, error: float) -> None:
    """Draws the accepted share by forecast; the size of a point is its number of tokens."""
    with _axes(file, "forecast", "accepted share", size=(4.4, 4.2)) as axes:
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        largest = max((count for count, _, _ in bins), default=1)
        axes.scatter(
            [forecast for _, forecast, _ in bins],
            [share for _, _, share in bins],
            s=[12 + 120 * count / largest for count, _, _ in bins],
            color=_COLOURS[0],
        )
        axes.set_title(f"expected calibration error {error:.3f}", fontsize=9)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)


def lines_of(curves: Mapping[str, Sequence[float]], *, references: Sequence[str]) -> list[Line]:
    """Returns a line per label, with x = 1, 2, 3..."""
    return [
        Line(
            label=label,
            x=range(1, len(values) + 1),
            y=values,
            is_reference=label in references,
        )
        for label, values in curves.items()
    ]


def _plot(axes: Any, line: Line, colour: str, *, marker: str = "") -> None:
    axes.plot(
        line.x,
        line.y,
        label=line.label,
        color="0.45" if line.is_reference else colour,
        linestyle="--" if line.is_reference else "-",
        linewidth=1.4,
        marker=marker,
    )


@contextmanager
def _axes(file: Path, x: str, y: str, *, size: tuple[float, float] = _SIZE) -> Iterator[Any]:
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.savefig(file)


def main(
    traces: Annotated[Path, "recording, of --record"],
    folder: Annotated[Path, "folder for the pictures"],
    report: Annotated[Path | None, "report of the same run"] = None,
    head: Annotated[Path, "folder of the exit head"] = BUNDLED_MODEL / "exit_head",
) -> None:
    """Replays a recording of `eesd bench control` and draws what it shows."""
    recording = TraceSet.load(traces)
    length = recording.max_draft_tokens
    setting = ReplaySetting(
        speculation=SpeculationConfig(max_draft_tokens=length, fixed_length=length),
        cost=recording.cost,
        calibrator=Calibrator.load(head),
    )
    judge = Judge(recording, setting, seed=0)
    findings = judge.findings(
        loads=_LOADS,
        loads_of_classes=(1,),
        max_tokens=max(trace.max_tokens for trace in recording.traces),
    )
    live = {} if report is None else live_over_plain(json.loads(report.read_text()))
    draw_all(folder, judge, findings, live)


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], program="python infra/draw_control.py"))
