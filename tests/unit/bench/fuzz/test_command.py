"""`eesd bench exact --random`: a fixed seed, failures, interruptions, and no Ray at all."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.bench.fuzz import command, play
from eesd_dist.bench.fuzz.campaign import Campaign
from eesd_dist.bench.fuzz.cases import Case
from eesd_dist.command_line import run_command
from serve_app.cli import main as cli
from tests.support.fuzz_plants import planted

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
    exit_status = main([*words, "--device", "cpu", "--case-folder", str(folder), "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    report: dict[str, Any] = json.loads(line)
    assert exit_status == status, report["failures"]
    return report


@pytest.mark.slow
def test_a_fixed_seed_finds_nothing_in_four_thousand_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--random-models", "3", "--dtype", "float32", "--dtype", "bfloat16")
    single = run(capsys, tmp_path, "--random", "8", "--tokens", "2500", *words)
    ranks = run(capsys, tmp_path, "--random", "17", "--tokens", "1500", *words)
    for report, engines in ((single, 3), (ranks, 1)):
        assert report["mismatches"] == 0
        assert report["engines"] >= engines
        assert report["counts"]["accepted"] > 100
    assert single["tokens"] + ranks["tokens"] >= 4000
    assert single["plain_tokens"] < single["tokens"]  # generated once, compared many times
    assert single["counts"]["preemptions"] > 0
    assert sum(single["troubles"].values()) > 5
    assert ranks["counts"]["lost stages"] > 0
    assert list(ranks["tokens_by_ranks"]) == ["draft 3, verify 3"]
    assert "commit" in single["provenance"]


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


def test_a_failure_is_counted_and_its_case_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(play, "Pipeline", planted("key"))
    words = ("--random-models", "4", "--max-failures", "1", "--minutes", "2")
    report = run(capsys, tmp_path / "not there yet", "--random", "2", *words, status=1)
    assert report["mismatches"] > 0
    (case, *_) = {failure["case"] for failure in report["failures"]}
    second_report = run(capsys, tmp_path, "--case", case, status=1)
    assert second_report["failures"][0]["what"] == report["failures"][0]["what"]


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
    assert cli.main([*exact, "--model", "random", "--help"]) == 0
    assert "--random-models" not in capsys.readouterr().out
    assert cli.main([*exact, "--case", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_the_fuzz_needs_a_model_and_a_seed_or_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--random", "1"]) == 2
    assert "no model: use --model FOLDER" in capsys.readouterr().err
    assert main(["--model", "x"]) == 2
    assert "give --random SEED, or --case FILE" in capsys.readouterr().err
