"""Draws the plots in docs/pictures from records in docs/benchmarks.

    python infra/draw_plots.py

A panel for each record: decoded tokens per second with speculation over those without it, by
requests at once or by class of prompts. Equal records give equal bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
RECORDS = ROOT / "docs" / "benchmarks"

_WIDTH, _HEIGHT = 860, 300
_BASE, _UNIT, _MAX_RATIO = 244, 60, 2.6
_LEFT, _PANEL, _GAP = 46, 256, 14
_CLASSES = {
    "gsm8k": "mathematics",
    "humaneval": "code",
    "mt_bench": "MT-bench",
    "qa": "questions",
    "rag": "RAG",
    "summarization": "summaries",
}
_STYLE = """
  .paper { fill: #ffffff } .text { fill: #1f2328 } .note { fill: #59636e } .line { stroke: #d1d9e0 }
  .plain { stroke: #59636e; stroke-dasharray: 5 4 } .gain { fill: #1b6ca8 } .loss { fill: #d1495b }
  .value { paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
  text { font: 12px system-ui, sans-serif } .title { font-weight: 600; font-size: 13px }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .text { fill: #e6edf3 } .note { fill: #9198a1 }
    .line { stroke: #3d444d } .plain { stroke: #9198a1 } .gain { fill: #58a6ff }
    .loss { fill: #ff7b72 } .value { stroke: #0d1117 }
  }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Speed-ups of one machine and model, by requests or by class of prompts."""

    title: str
    note: str
    axis: str = "requests at once"
    speedups: Mapping[int, float] | Mapping[str, float]
    width: int = _PANEL


def pictures() -> Mapping[str, Sequence[Panel]]:
    """Returns the panels of each file."""
    return {"speedups.svg": machine_panels(), "smollm2.svg": smollm2_panels()}


def smollm2_panels() -> Sequence[Panel]:
    record = _record("2026-11-28-smollm2-again-2cpu")
    by_class = record["offline"]["summary"]["by_class"]
    batches = record["batch"]["batches"]
    return (
        Panel(
            title="One request",
            note="six public sets, the prompt included",
            axis="prompts",
            speedups={
                label: by_class[name]["over_plain"]["goodput"]["value"]
                for name, label in _CLASSES.items()
            },
            width=2 * _PANEL + _GAP,
        ),
        Panel(
            title="Several requests",
            note="all sets",
            speedups={
                int(count): row["speculation"]["tokens_per_s"] / row["plain"]["tokens_per_s"]
                for count, row in batches.items()
            },
        ),
    )


def machine_panels() -> Sequence[Panel]:
    service = _record("2026-11-26-online-2cpu")["summary"]["tokens_per_s_on_over_off"]
    gpu_service = _record("2026-11-26-gpu-h100-service")["default"]["throughput"]
    engine = _record("2026-11-27-gpu-h200-second")["after"]["goodput_over_plain"]
    return (
        Panel(
            title="Two CPU cores, service",
            note="bundled model",
            axis="arrivals, times what one stream serves",
            speedups={int(load): ratio for load, ratio in service.items()},
        ),
        Panel(
            title="One H100, service",
            note="bundled model, whole answers",
            speedups=_ratios(
                [row for row in gpu_service if not row["stream"]],
                requests="concurrency",
                mode="speculation",
                speed="tokens_per_s",
                modes=("auto", "off"),
            ),
        ),
        Panel(
            title="One H200, engine",
            note="shape of Llama 3 8B, random weights",
            speedups={
                int(count): engine[count]["steady_tok_s, with the first"]["ratio"]
                for count in sorted(engine, key=int)
            },
        ),
    )


def picture(panels: Sequence[Panel]) -> str:
    """Returns the SVG."""
    lefts = accumulate((panel.width + _GAP for panel in panels), initial=_LEFT)
    body = "\n".join(
        line
        for panel, left in zip(panels, lefts, strict=False)
        for line in _panel(panel, left=left)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Speed-up over plain decoding">\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>\n'
        f"{_text(_LEFT, 24, 'Tokens per second over plain decoding', 'text title')}\n"
        f"{body}\n</svg>\n"
    )


def _panel(panel: Panel, *, left: int) -> Iterator[str]:
    yield _text(left, 52, panel.title, "text title")
    yield _text(left, 68, panel.note, "note")
    for tick in (0, 1, 2):
        y = _y(tick)
        kind = "plain" if tick == 1 else "line"
        yield f'<line class="{kind}" x1="{left}" x2="{left + panel.width - 20}" y1="{y}" y2="{y}"/>'
        if left == _LEFT:
            yield _text(left - 8, y + 4, str(tick), "note", anchor="end")
    step = (panel.width - 20) / len(panel.speedups)
    for index, (label, ratio) in enumerate(panel.speedups.items()):
        middle = round(left + (index + 0.5) * step)
        top, kind = _y(ratio), "gain" if ratio >= 1 else "loss"
        size = f'width="26" height="{_BASE - top}"'
        yield f'<rect class="{kind}" x="{middle - 13}" y="{top}" {size}/>'
        yield _text(middle, top - 5, f"{ratio:.2f}", "text value", anchor="middle")
        yield _text(middle, _BASE + 18, str(label), "text", anchor="middle")
    middle = left + (panel.width - 20) // 2
    yield _text(middle, _BASE + 38, panel.axis, "note", anchor="middle")


def _y(ratio: float) -> int:
    assert ratio <= _MAX_RATIO, ratio
    return round(_BASE - ratio * _UNIT)


def _text(x: int, y: int, text: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _ratios(
    rows: Sequence[Mapping[str, Any]],
    *,
    requests: str,
    mode: str,
    speed: str,
    modes: tuple[str, str],
) -> Mapping[int, float]:
    speeds = {(row[requests], row[mode]): row[speed] for row in rows}
    drafting, plain = modes
    counts = sorted({count for count, _ in speeds})
    return {count: speeds[count, drafting] / speeds[count, plain] for count in counts}


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return record


if __name__ == "__main__":
    for name, panels in pictures().items():
        (PICTURES / name).write_text(picture(panels))
