"""Runs the tests marked `gpu`."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.setting import Setting

_ROOT = Path(__file__).parents[4]
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


def run(setting: Setting, rows: Rows) -> None:
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if not find_spec(name)]
    if missing:
        rows.cannot("tests marked gpu", "not available", detail=f"no {', '.join(missing)}")
        return
    files = marked_files(_ROOT / "tests")
    if not files:
        rows.cannot("tests marked gpu", "not available", detail="found none")
        return
    # Warnings are errors in this project for its pinned versions; this machine may have others.
    words = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *map(str, files)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=setting.left_s,
    )
    lines = done.stdout.strip().splitlines()
    counts = {kind: int(number) for number, kind in _COUNT.findall(lines[-1] if lines else "")}
    passed = counts.get("passed", 0)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    rows.prove(
        "tests marked gpu",
        done.returncode == 0 and passed > 0,
        value=f"{passed} passed",
        detail="; ".join([*failed, lines[-1] if lines else done.stderr[-300:]]),
    )


def marked_files(tests: Path) -> list[Path]:
    """Returns the files to collect: others import packages that a GPU machine may lack."""
    return sorted(
        file for file in tests.rglob("test_*.py") if "pytest.mark.gpu" in file.read_text("utf-8")
    )
