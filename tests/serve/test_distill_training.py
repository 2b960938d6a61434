"""Two training workers under Ray Train, one of which is killed on the way."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.distill.train_head import train
from serve_app.distill.executors import RayExecutor
from tests.support.running import descendants
from tests.support.tiny_features import EXIT_LAYER, write_tiny_features, write_tiny_target

STEPS = 400
DEADLINE_S = 100.0


@pytest.mark.slow
def test_workers_under_ray_train_outlive_one_of_them_and_keep_the_curve(
    ray_port: int, tmp_path: Path
) -> None:
    write_tiny_features(tmp_path / "features", write_tiny_target(tmp_path / "target"))
    options = TrainOptions(
        rows=8,
        length=24,
        log_every=2,
        evaluate_every=100,
        checkpoint_every_s=0.1,
        save_dtype="float32",
    )
    undisturbed = TrainRequest(
        model=tmp_path / "target",
        features=tmp_path / "features",
        out=tmp_path / "undisturbed" / "head",
        checkpoints=tmp_path / "undisturbed" / "run",
        exit_layer=EXIT_LAYER,
        head="own",
        max_steps=STEPS,
        workers=2,
        zero_stage=2,
        threads=1,
        options=options,
    )
    disturbed = replace(
        undisturbed,
        out=tmp_path / "together" / "head",
        checkpoints=tmp_path / "together" / "run",
    )
    killed: list[int] = []
    killer = threading.Thread(target=kill_a_worker, args=(disturbed.run_folder, killed))
    killer.start()
    ctrl_c = signal.getsignal(signal.SIGINT)
    train(disturbed, executor=RayExecutor())
    killer.join()
    assert signal.getsignal(signal.SIGINT) is ctrl_c
    train(undisturbed, executor=RayExecutor())
    assert len(killed) == 1
    rows, expected = log_of(disturbed), log_of(undisturbed)
    assert [row["step"] for row in rows] == list(range(0, STEPS + 1, 2))
    for row, twin in zip(rows[1:], expected[1:], strict=True):
        assert row["loss"] == twin["loss"]
    assert load_file(disturbed.out / "model.safetensors").keys()


def kill_a_worker(run: Path, killed: list[int]) -> None:
    """Once there is a checkpoint, kills one of the workers with SIGKILL."""
    deadline = time.monotonic() + DEADLINE_S
    while not list(run.glob("step-*")):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    for process in descendants():
        try:
            name = (Path("/proc") / str(process.pid) / "cmdline").read_bytes()
            if b"RayTrainWorker" not in name:
                continue
            os.kill(process.pid, signal.SIGKILL)
        except OSError:  # the file has been removed since
            continue
        killed.append(process.pid)
        return


def log_of(request: TrainRequest) -> list[dict[str, Any]]:
    lines = (request.run_folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
