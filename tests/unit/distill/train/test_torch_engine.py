"""Training without DeepSpeed: the same head as with it, resumed after an interruption."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.distill.train.torch_engine import TorchEngine
from eesd_dist.distill.train_head import train as train_with
from eesd_dist.errors import ConfigError
from tests.support.tiny_features import EXIT_LAYER, write_tiny_features, write_tiny_target

OPTIONS = TrainOptions(
    rows=8,
    length=24,
    learning_rate=5e-3,
    clip=0.05,
    log_every=1,
    evaluate_every=10,
    checkpoint_every_steps=5,
    save_dtype="float32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_tiny_features(folder / "features", write_tiny_target(folder / "target"))
    return folder


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A None in `sys.modules` is what Python takes for a module that is not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)


def request_for(folder: Path, out: Path, **options: Any) -> TrainRequest:
    return TrainRequest(
        model=folder / "target",
        features=folder / "features",
        out=out / "head",
        checkpoints=out / "run",
        exit_layer=EXIT_LAYER,
        head="own",
        max_steps=20,
        threads=1,
        options=replace(OPTIONS, **options),
    )


def train(request: TrainRequest) -> dict[str, torch.Tensor]:
    train_with(request, executor=LocalExecutor())
    return load_file(request.out / "model.safetensors")


def log_of(request: TrainRequest) -> list[dict[str, Any]]:
    lines = (request.run_folder / "log.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0.0} for line in lines]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_curve_is_that_of_deepspeed(folder: Path, tmp_path: Path, accumulation: int) -> None:
    with_it = request_for(folder, tmp_path / "deepspeed", accumulation=accumulation)
    train(with_it)
    assert not list(with_it.run_folder.rglob("learner.pt"))
    without = request_for(folder, tmp_path / "torch", accumulation=accumulation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eesd_dist.distill.train.learner.has_deepspeed", lambda: False)
        train(without)
    assert list(without.run_folder.rglob("learner.pt"))
    curves = [[row["loss"] for row in log_of(request)[1:]] for request in (with_it, without)]
    assert curves[0][-1] < curves[0][0]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.usefixtures("without_deepspeed")
def test_an_interrupted_run_is_resumed_bit_for_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(request_for(folder, tmp_path / "whole"))
    request = request_for(folder, tmp_path / "interrupted")
    step, num_steps = TorchEngine.step, 0

    def interrupted(engine: TorchEngine) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 13:
            raise KeyboardInterrupt
        step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(request)
    assert not request.out.exists()
    head = train(request)
    assert log_of(request) == log_of(request_for(folder, tmp_path / "whole"))
    assert head.keys() == expected.keys()
    assert all(torch.equal(head[name], expected[name]) for name in head)


def test_a_checkpoint_of_deepspeed_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(folder, tmp_path)
    train(request)
    shutil.rmtree(request.out)
    monkeypatch.setattr("eesd_dist.distill.train.learner.has_deepspeed", lambda: False)
    with pytest.raises(ConfigError, match=r"checkpoint of DeepSpeed.*train into another folder"):
        train(request)


@pytest.mark.usefixtures("without_deepspeed")
def test_what_needs_deepspeed_says_so_before_any_step(folder: Path, tmp_path: Path) -> None:
    request = replace(request_for(folder, tmp_path), zero_stage=2)
    with pytest.raises(ConfigError, match=r"ZeRO and bfloat16 need DeepSpeed.*pip install"):
        train(request)
    assert not request.run_folder.exists()
