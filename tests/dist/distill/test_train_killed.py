"""A killed training process, started again, gives the curve of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.tiny_features import write_tiny_features, write_tiny_target

pytestmark = pytest.mark.dist

STEPS = 400
DEADLINE_S = 120.0


def start(folder: Path, name: str) -> "subprocess.Popen[str]":
    """Starts `eesd distill train`, with a checkpoint at nearly every logged step."""
    words = {
        "--model": folder / "target",
        "--features": folder / "features",
        "--out": folder / name / "head",
        "--checkpoints": folder / name / "run",
        "--head": "own",
        "--max-steps": STEPS,
        "--rows": 8,
        "--length": 24,
        "--log-every": 2,
        "--evaluate-every": 50,
        "--checkpoint-every": 0.02,
        "--save-dtype": "float32",
        "--threads": 1,
    }
    command = [sys.executable, "-m", "serve_app.cli.main", "distill", "train"]
    command += [str(word) for pair in words.items() for word in pair]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})


def log_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


def wait_for_steps(run: Path, num_rows: int, process: "subprocess.Popen[str]") -> None:
    log = run / "log.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while not log.exists() or len(log.read_bytes().splitlines()) < num_rows:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ends_well(process: "subprocess.Popen[str]") -> None:
    _, output = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert "Warning" not in output, output


@pytest.mark.parametrize("kills", [(15,), pytest.param((15, 70), marks=pytest.mark.nightly)])
def test_a_killed_run_has_the_curve_and_the_head_of_one_that_was_not(
    kills: Sequence[int], tmp_path: Path
) -> None:
    """`kills`: rows of the log at which the process is killed, each time another one."""
    write_tiny_features(tmp_path / "features", write_tiny_target(tmp_path / "target"))
    undisturbed = start(tmp_path, "whole")
    run = tmp_path / "killed" / "run"
    for num_rows in kills:
        process = start(tmp_path, "killed")
        wait_for_steps(run, num_rows, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # A kill may happen while a checkpoint is saved; this plants such a case.
        (run / "saving-00000299").mkdir(exist_ok=True)
        (run / "saving-00000299" / "mp_rank_00_model_states.pt").write_bytes(b"half")
        steps = [int(path.name.removeprefix("step-")) for path in run.glob("step-*")]
        assert 0 < max(steps) < STEPS
    last = start(tmp_path, "killed")
    ends_well(last)
    ends_well(undisturbed)
    log_rows, expected = log_of(run), log_of(tmp_path / "whole" / "run")
    assert log_rows == expected
    assert [row["step"] for row in log_rows] == list(range(0, STEPS + 1, 2))
    head, twin = (
        load_file(tmp_path / name / "head" / "model.safetensors") for name in ("killed", "whole")
    )
    assert all(bool((head[key] == twin[key]).all()) for key in twin)
