"""The full `infra/gpu/check.sh --device cpu`, on a copy, without Ray and a server."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Twice the longest expected time, since other work may run on the same cores.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[4]
COPIED = ("eesd_dist", "infra", "serve_app/demo_model")
ABSENT = (
    "deepspeed",
    "fastapi",
    "openai",
    "opentelemetry",
    "prometheus_client",
    "ray",
    "starlette",
    "uvicorn",
)
BLOCKER = f"""
import sys

class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, _Absent())
"""


@dataclass(frozen=True)
class Check:
    status: int
    lines: list[str]
    report: Mapping[str, Any]

    def rows(self, section: str) -> dict[str, Mapping[str, Any]]:
        return {row["name"]: row for row in self.report["rows"] if row["section"] == section}


def run_check(folder: Path, site: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """`site`: modules that take precedence over all others."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(site)}
    return subprocess.run(
        [str(folder / "infra" / "gpu" / "check.sh"), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    folder, site = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("site")
    for name in COPIED:
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__", "wheels"),
        )
    (site / "sitecustomize.py").write_text(BLOCKER)
    words = [sys.executable, "-c", "import ray"]
    blocked = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(site)}, check=False)
    assert blocked.returncode == 1
    done = run_check(folder, site, "--device", "cpu", "--minutes", "10")
    assert (folder / "gpu-check.json").is_file(), done.stdout + done.stderr
    report = json.loads((folder / "gpu-check.json").read_text())
    assert report["ok"], done.stdout + done.stderr[-3000:]
    return Check(status=done.returncode, lines=done.stdout.splitlines(), report=report)


@pytest.mark.slow
def test_all_sections_run_and_nothing_fails(check: Check) -> None:
    assert check.status == 0
    assert check.report["failed"] == []
    sections = list(dict.fromkeys(row["section"] for row in check.report["rows"]))
    assert sections == [
        "versions",
        "spans",
        "invariance",
        "noise",
        "exactness",
        "nccl",
        "pages",
        "times",
        "pytest",
    ]


@pytest.mark.slow
def test_what_needs_a_gpu_says_so(check: Check) -> None:
    told = {row["name"] for row in check.report["rows"] if row["value"] == "needs cuda"}
    assert {"GPU, driver, CUDA, NCCL", "NCCL group of one, of two", "section"} <= told
    assert check.rows("nccl")["NCCL abort while a kernel is stuck"]["value"] == "needs 2 GPUs"


@pytest.mark.slow
def test_what_a_cpu_can_prove_is_proven(check: Check) -> None:
    proven = {
        section: {name for name, row in check.rows(section).items() if row["ok"] is True}
        for section in ("spans", "invariance", "noise", "nccl", "pages")
    }
    assert {"bundled, float32", "bundled, bfloat16", "exit head, float32"} <= proven["spans"]
    assert {"products, bundled, bfloat16", "attention, bundled, float32"} <= proven["invariance"]
    assert {"top_p: as on the CPU", "gumbel, a shard and single rows"} <= proven["noise"]
    assert proven["nccl"] == {"Gloo, two ranks, tensors from cpu"}
    assert proven["pages"] == {
        "pages from one store on cpu to another",
        "pages over Gloo, from cpu to cpu",
    }


@pytest.mark.slow
def test_times_are_told_and_not_judged(check: Check) -> None:
    times = check.rows("times")
    assert {"bundled, verify(1)", "bundled, draft step", "bundled, transformers, batch 2"} <= set(
        times
    )
    assert all(row["ok"] is None for row in times.values())
    assert all(row["value"] > 0 for row in times.values())


@pytest.mark.slow
def test_the_table_is_short_and_sums_up(check: Check) -> None:
    head = next(at for at, line in enumerate(check.lines) if line.startswith("section"))
    table = check.lines[head:]
    assert len(table) == len(check.report["rows"]) + 2 < 100
    assert sum(len(line) + 1 for line in check.lines) < 12_000
    assert ", 0 failed, " in table[-1]


@pytest.mark.slow
def test_the_json_says_where_it_comes_from(check: Check) -> None:
    provenance = check.report["provenance"]
    assert "torch" in provenance["versions"]
    assert provenance["hardware"]["cpu_model"]


def test_a_planted_error_is_exit_status_1(tmp_path: Path) -> None:
    """Makes one bit of the noise depend on the type of the token ids."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.abc import MetaPathFinder\n"
        "class _Plant(MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'eesd_dist.bench.gpu_check.sections.noise':\n"
        "            sys.meta_path.remove(self)\n"
        "            from eesd_dist.sampling import noise\n"
        "            true = noise.gumbel\n"
        "            def gumbel(keys, ids):\n"
        "                drawn = true(keys, ids)\n"
        "                if ids.element_size() == 8: drawn[0, 0] += 1e-6\n"
        "                return drawn\n"
        "            noise.gumbel = gumbel\n"
        "sys.meta_path.insert(0, _Plant())\n"
    )
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--section", "noise", "--out", str(out)]
    done = run_check(ROOT, tmp_path, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert (report["ok"], report["failed"]) == (False, ["noise: gumbel, int64 ids below 20000"])
    assert "1 failed (noise)" in done.stdout.splitlines()[-1]
