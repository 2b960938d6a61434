"""Checks one GPU in a few minutes, without a network and without Ray.

    infra/gpu/check.sh [--device cuda|cpu] [--minutes M] [--section NAME]... [--out FILE]

Each section runs in a separate process with a time limit; if one fails, hangs or crashes, it is
reported and the others continue. Ends with a table, and a JSON file with the same rows and their
provenance. Exit status 1 if a row failed; a section that does not finish counts as failed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eesd_dist.bench.gpu_check.processes import run_section
from eesd_dist.bench.gpu_check.report import failures, json_of, table_of
from eesd_dist.bench.gpu_check.report_rows import Row
from eesd_dist.bench.gpu_check.setting import SECTIONS, DeviceName, Section
from eesd_dist.bench.options import BUNDLED_MODEL
from eesd_dist.provenance import collect_provenance

_LEAST_S = 60.0
"""Minimum time of a section, even if the minutes are spent: importing torch takes a while."""


def main(argv: Sequence[str], *, sections: Sequence[Section] = SECTIONS) -> int:
    options = _options(argv, [section.name for section in sections])
    chosen = [s for s in sections if not options.section or s.name in options.section]
    began_s = time.monotonic()
    provenance = collect_provenance(seed=0)
    rows = run_sections(chosen, device=options.device, model=options.model, minutes=options.minutes)
    minutes = (time.monotonic() - began_s) / 60
    options.out.write_text(
        json_of(rows, provenance=provenance, minutes=minutes, device=options.device)
    )
    sys.stdout.write("\n".join(table_of(rows, minutes=minutes)) + "\n")
    return 1 if failures(rows) else 0


def run_sections(
    sections: Sequence[Section], *, device: DeviceName, model: Path, minutes: float
) -> list[Row]:
    """Runs all sections in order; unused time of a section goes to the later ones."""
    rows: list[Row] = []
    deadline = time.monotonic() + 60 * minutes
    for at, section in enumerate(sections):
        if section.needs_cuda and device != "cuda":
            rows.append(Row(section=section.name, name="section", value="needs cuda"))
            continue
        shares = sum(later.share for later in sections[at:])
        left_s = max(deadline - time.monotonic(), 0.0)
        seconds = max(left_s * section.share / shares, _LEAST_S)
        _say(f"{section.name}: at most {seconds:.0f} s")
        started_s, before = time.monotonic(), len(rows)
        run_section(section, device=device, model=model, seconds=seconds, emit=rows.append)
        mine = rows[before:]
        _say(
            f"{section.name}: {len(mine)} rows, {len(failures(mine))} failed, "
            f"{time.monotonic() - started_s:.1f} s"
        )
    return rows


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options(argv: Sequence[str], names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="infra/gpu/check.sh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes (cuda)")
    add("--minutes", type=float, default=9.0, help="approximate time of all sections (9)")
    add("--section", action="append", choices=names, help="only this section; may be repeated")
    add("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder (the bundled model)")
    add("--out", type=Path, default=Path("gpu-check.json"), help="(./gpu-check.json)")
    return parser.parse_args(argv)
