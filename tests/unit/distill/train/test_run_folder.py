"""The folder of a run: atomic checkpoints, a log without duplicates, one job."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eesd_dist.distill.train.run_folder import RunFolder
from eesd_dist.errors import CheckpointError, ConfigError

JOB = {"seed": 1, "options": {"rows": 8}}


def save(folder: RunFolder, step: int) -> None:
    unfinished = folder.unfinished(step)
    unfinished.mkdir(parents=True)
    (unfinished / "state.bin").write_bytes(step.to_bytes(4, "little"))
    folder.commit(step)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(JOB)
    assert folder.latest_step() is None
    for step in (5, 90, 100):
        save(folder, step)
    assert folder.latest_step() == 100
    assert sorted(path.name for path in folder.folder.glob("step-*")) == [
        "step-00000090",
        "step-00000100",
    ]
    assert (folder.checkpoint(100) / "state.bin").read_bytes()[0] == 100


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(JOB)
    save(folder, 10)
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from eesd_dist.distill.train.run_folder import RunFolder\n"
        "unfinished = RunFolder(Path(sys.argv[1])).unfinished(20)\n"
        "unfinished.mkdir()\n"
        "(unfinished / 'state.bin').write_bytes(b'half')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder.folder)], env={**os.environ}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    reopened = RunFolder(folder.folder)
    assert reopened.latest_step() == 10
    reopened.claim(JOB)
    assert not list(folder.folder.glob("saving-*"))
    assert (reopened.checkpoint(10) / "state.bin").exists()


def test_another_job_may_not_go_on_in_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(JOB)
    folder.claim({"options": {"rows": 8}, "seed": 1})
    with pytest.raises(ConfigError, match=r"seed 1, now asked for 2.*another folder"):
        folder.claim({**JOB, "seed": 2})
    (folder.folder / "job.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"job\.json: found Expecting.*a JSON object"):
        folder.claim(JOB)


def test_the_log_is_cut_to_the_checkpoint_and_loses_a_torn_row(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(JOB)
    for step in range(6):
        folder.write_row({"step": step, "loss": 1.0})
    with folder.log.open("a") as log:
        log.write('{"step": 6, "lo')
    folder.cut_log(after_step=3)
    folder.write_row({"step": 4, "loss": 2.0})
    rows = [json.loads(line) for line in folder.log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
