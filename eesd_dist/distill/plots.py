"""The reliability diagram. matplotlib is loaded when a picture is drawn, without a display."""

from collections.abc import Sequence
from pathlib import Path

from eesd_dist.control.calibrator import ReliabilityBin


def draw_reliability(
    file: Path, *, before: Sequence[ReliabilityBin], after: Sequence[ReliabilityBin], title: str
) -> None:
    """Forecast against what came true; the area of a point is its share of the tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 5.0), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([0.0, 1.0], [0.0, 1.0], color="0.6", linewidth=0.8, linestyle="--")
    for bins, label, colour in (
        (before, "head's own top-1 probability", "#d1495b"),
        (after, "calibrated", "#1b6ca8"),
    ):
        total = sum(one.num_judged for one in bins)
        forecasts = [one.mean_forecast for one in bins]
        shares = [one.accepted_share for one in bins]
        axes.plot(forecasts, shares, color=colour, linewidth=1.0)
        sizes = [10.0 + 600.0 * one.num_judged / total for one in bins]
        axes.scatter(forecasts, shares, s=sizes, color=colour, alpha=0.6, label=label)
    axes.set(
        xlim=(0.0, 1.0),
        ylim=(0.0, 1.0),
        xlabel="forecast",
        ylabel="share accepted",
        aspect="equal",
    )
    axes.set_title(title, fontsize=9)
    axes.legend(loc="upper left", fontsize=8, markerscale=0.4)
    partial = file.with_name(f".{file.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(file)
