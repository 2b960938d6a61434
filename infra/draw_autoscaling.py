"""Draws docs/pictures/autoscaling-timeline.png from a report of `python -m tests.autoscaling`.

python infra/draw_autoscaling.py REPORT.json PICTURE.png
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_BLUE, _RED, _GREEN, _GREY = "#1b6ca8", "#d1495b", "#3a7d44", "0.45"


def draw(timeline: dict[str, Any], picture: Path) -> None:
    """Writes a PNG with the load above, and pipelines and nodes below."""
    figure = Figure(figsize=(7.2, 4.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    load, fleet = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.4))
    samples = timeline["samples"]
    at_s = [sample["at_s"] for sample in samples]
    load.step(at_s, [sample["num_clients"] for sample in samples], where="post", color=_BLUE)
    load.set_ylabel("live requests", fontsize=9)
    for key, name, colour, style in (
        ("wanted", "wanted", _RED, "--"),
        ("ready", "pipelines ready", _BLUE, "-"),
        ("nodes", "nodes", _GREEN, ":"),
    ):
        values = [sample[key] for sample in samples]
        fleet.step(at_s, values, where="post", color=colour, linestyle=style, label=name)
    for number, decision in enumerate(timeline["decisions"][1:]):
        fleet.axvline(decision["at_s"], color=_GREY, linewidth=0.6)
        label = f"{decision['wanted']} by {decision['signal']}"
        height = 2.7 - 0.2 * (number % 2)  # two that follow closely do not overlap
        fleet.text(decision["at_s"] + 0.5, height, label, fontsize=7, color=_GREY)
    for phase in timeline["phases"]:
        load.axvline(phase["ended_s"], color="0.85", linewidth=0.8)
        middle_s = (phase["began_s"] + phase["ended_s"]) / 2
        load.text(middle_s, 8.8, phase["name"], fontsize=7, color=_GREY, ha="center")
    load.set_ylim(0.0, 9.8)
    fleet.set_ylim(-0.1, 2.9)
    fleet.set_yticks([0, 1, 2])
    fleet.set_ylabel("number", fontsize=9)
    fleet.set_xlabel("seconds", fontsize=9)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    for axes in (load, fleet):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)


if __name__ == "__main__":
    report, picture = map(Path, sys.argv[1:])
    draw(json.loads(report.read_text())["timeline"], picture)
