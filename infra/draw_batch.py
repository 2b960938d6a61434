"""Draws docs/pictures/batch.png from a record of `infra/batch_scale.py --real`.

    python infra/draw_batch.py RECORD.json PICTURE.png

The tokens per second of a job over its time, and the rows that are done.
"""

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_BLUE, _GREY = "#1b6ca8", "0.45"
_WINDOW_S = 4.0


def draw(report: dict[str, Any], picture: Path) -> None:
    """Writes a PNG."""
    figure = Figure(figsize=(7.2, 2.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width_s, rates = report["seconds_per_bin"], report["tokens_per_s_by_bin"]
    at_s = [(number + 0.5) * width_s for number in range(len(rates))]
    axes.plot(at_s, _smoothed(rates, max(1, round(_WINDOW_S / width_s))), color=_BLUE)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_ylabel("tokens/s", fontsize=9, color=_BLUE)
    shares = list(accumulate(report["rows_by_bin"]))
    rows = axes.twinx()
    rows.plot(at_s, [share / shares[-1] for share in shares], color=_GREY, linestyle=":")
    rows.axhline(0.9, color="0.85", linewidth=0.8)
    rows.set_ylim(0, 1.02)
    rows.set_ylabel("rows done", fontsize=9, color=_GREY)
    for side in (axes, rows):
        side.tick_params(labelsize=8)
        side.spines["top"].set_visible(False)
    figure.savefig(picture)


def _smoothed(values: list[float], width: int) -> list[float]:
    """Returns the mean of each value and those around it."""
    means = []
    for number in range(len(values)):
        window = values[max(0, number - width // 2) : number + width // 2 + 1]
        means.append(sum(window) / len(window))
    return means


if __name__ == "__main__":
    record, picture = map(Path, sys.argv[1:])
    draw(json.loads(record.read_text()), picture)
