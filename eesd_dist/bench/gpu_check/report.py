"""Formats rows as a table and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from eesd_dist.bench.gpu_check.report_rows import Row
from eesd_dist.provenance import Provenance

WIDTH = 118
"""A hundred such lines are less than 12,000 characters, the limit of some logs."""
_FAILED_DETAIL = 600


def table_of(rows: Sequence[Row], *, minutes: float) -> list[str]:
    """Returns aligned columns, failures in full below them, and a summary as the last line."""
    cells = [("section", "name", "", "value", "detail")]
    cells += [(r.section, r.name, _verdict(r), _value(r), r.detail) for r in rows]
    widths = [max(len(cell[at]) for cell in cells) for at in range(4)]
    widths[1], widths[3] = min(widths[1], 46), min(widths[3], 24)
    lines = []
    for cell in cells:
        columns = [text[:width].ljust(width) for text, width in zip(cell[:4], widths, strict=True)]
        lines.append("  ".join([*columns, cell[4]])[:WIDTH].rstrip())
    for row in failures(rows):
        lines.append(
            f"FAILED {row.section}, {row.name}: {_value(row)} {row.detail}"[:_FAILED_DETAIL]
        )
    lines.append(summary_of(rows, minutes=minutes))
    return lines


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.ok is False]


def summary_of(rows: Sequence[Row], *, minutes: float) -> str:
    num_ok = sum(row.ok is True for row in rows)
    num_told = sum(row.ok is None for row in rows)
    failed = failures(rows)
    names = f" ({', '.join(sorted({row.section for row in failed}))})" if failed else ""
    return (
        f"{num_ok} ok, {len(failed)} failed{names}, {num_told} measured or not possible here, "
        f"{minutes:.1f} minutes"
    )


def json_of(rows: Sequence[Row], *, provenance: Provenance, minutes: float, device: str) -> str:
    report = {
        "device": device,
        "minutes": round(minutes, 2),
        "ok": not failures(rows),
        "failed": [f"{row.section}: {row.name}" for row in failures(rows)],
        "rows": [asdict(row) for row in rows],
        "provenance": provenance.as_json(),
    }
    return json.dumps(report, indent=1) + "\n"


def _verdict(row: Row) -> str:
    return {True: "ok", False: "FAIL", None: "-"}[row.ok]


def _value(row: Row) -> str:
    if row.value is None:
        return ""
    text = row.value if isinstance(row.value, str) else _number(row.value)
    return f"{text} {row.unit}".rstrip()


def _number(value: float) -> str:
    if value == 0 or 0.01 <= abs(value) < 100_000:
        return f"{value:.4g}"
    return f"{value:.2e}"
