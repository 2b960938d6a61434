"""`eesd bench exact --random`: a fixed seed, planted errors, interruptions, and no Ray at all."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.bench.fuzz import campaign, command
from eesd_dist.bench.fuzz.campaign import Campaign
from eesd_dist.bench.fuzz.cases import Case
from eesd_dist.bench.fuzz.plants import PLANTS
from eesd_dist.command_line import run_command
from serve_app.cli import main as cli

BLOCKED = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "fastapi", "opentelemetry", "uvicorn", "starlette"):
            raise ImportError(f"{name} is not installed here")
        return None
sys.meta_path.insert(0, Blocked())
import runpy
runpy.run_module("eesd_dist.bench.fuzz", run_name="__main__", alter_sys=True)
"""


def main(words: Sequence[str]) -> int:
    return run_command(command.main, words, program="python -m eesd_dist.bench.fuzz")


def run(
    capsys: pytest.CaptureFixture[str], folder: Path, *words: str, status: int = 0
) -> dict[str, Any]:
    found = main([*words, "--device", "cpu", "--case-folder", str(folder), "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    report: dict[str, Any] = json.loads(line)
    assert found == status, report["failures"]
    return report


@pytest.mark.slow
def test_a_fixed_seed_finds_nothing_in_four_thousand_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--random-models", "3", "--dtype", "float32", "--dtype", "bfloat16")
    alone = run(capsys, tmp_path, "--random", "8", "--tokens", "2500", *words)
    ranks = run(capsys, tmp_path, "--random", "17", "--tokens", "1500", *words)
    for report, engines in ((alone, 3), (ranks, 1)):
        assert report["mismatches"] == 0
        assert report["engines"] >= engines
        assert report["counts"]["accepted"] > 100
    assert alone["tokens"] + ranks["tokens"] >= 4000
    assert alone["plain_tokens"] < alone["tokens"]  # generated once, compared many times
    assert alone["counts"]["preemptions"] > 0
    assert sum(alone["troubles"].values()) > 5
    assert ranks["counts"]["lost stages"] > 0
    assert list(ranks["tokens_by_ranks"]) == ["draft 3, verify 3"]
    assert "commit" in alone["provenance"]


@pytest.mark.parametrize(
    "plant", [p if p == "page" else pytest.param(p, marks=pytest.mark.slow) for p in PLANTS]
)
def test_a_planted_error_is_found_and_seen_again(
    plant: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = found(plant, 2, capsys, tmp_path, reduce_s=0)
    case = Path(report["failures"][0]["case"])
    again = run(capsys, tmp_path, "--case", str(case), "--reduce-s", "0", status=1)
    assert again["failures"][0]["what"] == report["failures"][0]["what"]
    case.write_text(json.dumps({**json.loads(case.read_text()), "plant": None}))
    assert run(capsys, tmp_path, "--case", str(case))["mismatches"] == 0


def test_a_failure_is_made_smaller(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = found("key", 4, capsys, tmp_path, reduce_s=60)
    case = Path(report["failures"][0]["case"])
    drawn = json.loads(case.read_text())
    assert len(drawn["entries"]) == 1
    again = run(capsys, tmp_path, "--case", str(case), "--reduce-s", "0", status=1)
    assert again["failures"][0]["entry"] == drawn["entries"][0]["name"]


def found(
    plant: str, seed: int, capsys: pytest.CaptureFixture[str], folder: Path, *, reduce_s: int
) -> dict[str, Any]:
    """Runs until the planted error is found."""
    report = run(
        capsys,
        folder,
        *("--random", str(seed), "--random-models", "8", "--plant", plant),
        *("--minutes", "2", "--max-failures", "1", "--reduce-s", str(reduce_s)),
        status=1,
    )
    assert report["mismatches"] >= 1, seed
    assert report["seconds"] < 120, seed
    return report


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_error_is_found_for_ten_of_ten_seeds(
    plant: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for seed in range(1, 11):
        found(plant, seed, capsys, tmp_path, reduce_s=0)


def test_an_interrupted_run_goes_on_and_another_one_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = tmp_path / "state.jsonl"
    words = ("--random", "2", "--random-models", "1", "--dtype", "float32", "--state", str(state))
    first = run(capsys, tmp_path, *words, "--tokens", "300")
    rows = state.read_text().splitlines()
    with state.open("a") as lines:
        lines.write('{"number": 1, "tok')  # a crash in the middle of a write
    second = run(capsys, tmp_path, *words, "--tokens", str(first["tokens"] + 1))
    assert state.read_text().splitlines()[: len(rows)] == rows
    assert second["engines"] > first["engines"]
    numbers = [json.loads(line)["number"] for line in state.read_text().splitlines()[1:]]
    assert numbers == list(range(second["engines"]))
    third = run(capsys, tmp_path, *words, "--tokens", "1")
    assert third["tokens"] == second["tokens"]
    assert main([*words[2:], "--random", "3", "--json"]) == 2
    assert "found a run with" in capsys.readouterr().err


def test_ctrl_c_ends_with_the_totals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    progress = Campaign._progress

    def then_ctrl_c(campaign: Campaign, case: Case) -> None:
        progress(campaign, case)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Campaign, "_progress", then_ctrl_c)
    words = ("--random", "1", "--random-models", "3", "--tokens", "1000000")
    # Tests in the background of a shell ignore this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        report = run(capsys, tmp_path, *words, status=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert report["was_stopped"]
    assert report["engines"] == 1


def test_a_failure_counts_though_ctrl_c_ends_its_reduction(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> Case:
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "reduced", interrupted)
    words = ("--random", "2", "--random-models", "4", "--plant", "key", "--minutes", "2")
    folder = tmp_path / "not there yet"
    report = run(capsys, folder, *words, status=1)
    assert report["mismatches"] > 0
    assert Path(report["failures"][0]["case"]).exists()


def test_it_runs_where_neither_ray_nor_a_server_is_installed(tmp_path: Path) -> None:
    words = ["--random", "2", "--random-models", "1", "--tokens", "50", "--device", "cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words, "--case-folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] >= 50


def test_exact_with_a_seed_or_a_case_is_the_fuzz(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    exact = ("bench", "exact")
    for words in (("--random", "1"), ("--random=4",), ("--case", "x")):
        assert cli.main([*exact, *words, "--help"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("Usage: eesd bench exact [OPTIONS]")
        assert "--random-models" in printed
        assert "--plant" not in printed
    assert cli.main([*exact, "--model", "random", "--help"]) == 0
    assert "--random-models" not in capsys.readouterr().out
    assert cli.main([*exact, "--case", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_the_fuzz_needs_a_model_and_a_seed_or_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--random", "1"]) == 2
    assert "no model: use --model FOLDER" in capsys.readouterr().err
    assert main(["--model", "x"]) == 2
    assert "give --random SEED, or --case FILE" in capsys.readouterr().err
