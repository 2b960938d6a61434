"""What a model check finds before anything is started."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eesd_dist.config import EngineConfig, ModelConfig, ParallelConfig
from eesd_dist.errors import ConfigError
from eesd_dist.workers.checking import ModelCheck
from tests.support.tiny_service import write_tiny_service


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("model") / "tiny")


def _check(folder: Path, *, device: str = "cpu", verify_tp: int = 1) -> None:
    config = EngineConfig(
        model=ModelConfig(path=folder, device=device),
        parallel=ParallelConfig(verify_tensor_parallel_size=verify_tp),
    )
    ModelCheck(config).finish()


def test_a_model_that_would_load_passes(model: Path) -> None:
    _check(model, verify_tp=2)


def test_a_degree_that_the_heads_do_not_allow(model: Path) -> None:
    with pytest.raises(ConfigError, match="3 tensor-parallel ranks cannot share evenly"):
        _check(model, verify_tp=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(model: Path) -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device: use auto or cpu"):
        _check(model, device="cuda")


def test_a_tensor_of_another_shape_and_a_missing_tokenizer(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj.weight of shape \(3, 3\)"):
        _check(broken)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        _check(broken)


def test_another_architecture_and_a_head_of_another_model(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(ConfigError, match="exit_head"):
        _check(other)
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["Unheard"]}))
    with pytest.raises(ConfigError, match="Unheard"):
        _check(other)


def test_a_check_that_is_stopped_is_not_waited_for(model: Path) -> None:
    config = EngineConfig(model=ModelConfig(path=model.parent / "nothing"))
    waits: list[float] = []

    def stopped(seconds: float) -> bool:
        waits.append(seconds)
        return True

    ModelCheck(config).finish(stopped=stopped)  # its error would be raised
    assert len(waits) == 1
