"""Plots for a comparison of controllers, as small PNG files.

Takes plain numbers. matplotlib is loaded when the first picture is drawn, without a display.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZE = (7.2, 3.6)
_DPI = 100
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5ea2", "#e08e1a", "#4d4d4d", "#17a2a2", "#a0522d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_reference: bool = False
    """Whether to draw it grey and dashed: oracle, plain decoding, best fixed length."""


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.savefig(file)
