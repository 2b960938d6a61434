"""The type in which weights are loaded, and how it changes them."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import DType, EngineConfig, ModelConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import CheckpointError
from eesd_dist.model.dtype import resolve_dtype
from eesd_dist.model.kernels import LinearPacker
from eesd_dist.model.weights import Checkpoint
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import Stages
from tests.unit.model.test_checkpoint_errors import edit_config

WARNING = "weights rounded: "


def _store(folder: Path, stored: torch.dtype, **config: object) -> Path:
    """A checkpoint of this type, with a config.json that says `config` of it."""
    save_tiny_model(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: x.to(stored) for k, x in tensors.items()}, folder / "model.safetensors")
    edit_config(folder, **({"dtype": None} | config))
    return folder


def _write(folder: Path, weight: Tensor) -> Path:
    save_file({"weight": weight}, folder / "model.safetensors")
    return folder


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith(WARNING)]


@pytest.mark.parametrize(
    ("stored", "config", "expected"),
    [
        (torch.float32, {"dtype": "bfloat16"}, "bfloat16"),
        (torch.float32, {"torch_dtype": "float16"}, "float16"),
        (torch.float32, {"dtype": "torch.float32", "torch_dtype": "float16"}, "float32"),
        (torch.float32, {}, "float32"),
        (torch.bfloat16, {}, "bfloat16"),
        (torch.float16, {"dtype": "float8_e4m3fn"}, "float16"),
        (torch.float64, {}, "float32"),
    ],
)
def test_auto_is_the_checkpoints_own_type(
    tmp_path: Path, stored: torch.dtype, config: dict[str, object], expected: DType
) -> None:
    folder = _store(tmp_path, stored, **config)
    assert resolve_dtype("auto", folder) == expected
    assert layout_of(EngineConfig(model=ModelConfig(path=folder))).dtype == expected


def test_a_type_that_is_chosen_wins(tmp_path: Path) -> None:
    folder = _store(tmp_path, torch.bfloat16)
    assert resolve_dtype("float32", folder) == "float32"
    (folder / "config.json").unlink()
    assert resolve_dtype("float16", folder) == "float16"


def test_the_bundled_model_is_computed_with_as_before() -> None:
    assert layout_of(EngineConfig(model=ModelConfig(path=BUNDLED_MODEL))).dtype == "bfloat16"


def test_integers_are_no_type_for_weights(tmp_path: Path) -> None:
    folder = _store(tmp_path, torch.int8)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight of type I8"):
        resolve_dtype("auto", folder)


def test_a_checkpoint_that_is_rounded_says_how_much_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    read = {k: x for k, x in tensors.items() if k.startswith("model.layers.0.") or "embed" in k}
    count = sum(x.numel() for x in read.values())
    changed = sum(int((x.bfloat16().float() != x).sum()) for x in read.values())
    Stages.load(tmp_path, dtype="bfloat16")
    of_draft, of_verify = _warnings(caplog)
    assert of_draft.startswith(f"{WARNING}folder={tmp_path} changed={changed} of={count}: ")
    assert 0.9 * count < changed <= count
    assert f"folder={tmp_path}" in of_verify


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.bfloat16, "float32"),
        (torch.float16, "float16"),
        (torch.float16, "float32"),
    ],
)
def test_a_type_that_holds_all_weights_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: torch.dtype, dtype: DType
) -> None:
    Stages.load(_store(tmp_path, stored), dtype=dtype)
    assert _warnings(caplog) == []


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_change_are_counted_one_by_one(tmp_path: Path, own: bool) -> None:
    sizes = 2.0 ** torch.arange(-30, 15)
    weight = (sizes * (1 + torch.arange(45) / 128)).bfloat16()
    weight = torch.cat([weight, -weight, torch.zeros(10)]).repeat(6000).to(torch.bfloat16)
    folder = _write(tmp_path, weight.view(-1, 4))
    with Checkpoint(folder) as checkpoint:
        shape = (len(weight) // 4, 4)
        read = checkpoint.read("weight", shape=shape, dtype=torch.float16, own=own)
        block = checkpoint.read(
            "weight", shape=shape, rows=range(8), columns=range(1, 3), dtype=torch.float16
        )
    changed = (weight.double() != read.view(-1).double()).sum()
    block_changed = (weight.view(-1, 4)[:8, 1:3].double() != block.double()).sum()
    assert 0 < changed < len(weight) / 3
    assert checkpoint.rounding.num_changed == changed + block_changed
    assert checkpoint.rounding.num_read == len(weight) + 16


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [
        (torch.tensor([1.0, -1e6]).bfloat16(), torch.float16),
        (torch.tensor([65520.0, 1.0]), torch.float16),
        (torch.tensor([3.4e38, 1.0]), torch.bfloat16),
        (torch.tensor([1e39, 1.0], dtype=torch.float64), torch.float32),
    ],
)
def test_a_weight_that_would_become_infinite_is_refused(
    tmp_path: Path, weight: Tensor, dtype: torch.dtype
) -> None:
    folder = _write(tmp_path, weight)
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"weight with a weight of .*wider model\.dtype"):
        checkpoint.read("weight", shape=(2,), dtype=dtype)


def test_a_span_of_infinite_weights_is_refused_before_it_computes(tmp_path: Path) -> None:
    folder = _store(tmp_path, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"found .*layers\.1\.mlp\.down_proj.* of 99840"):
        Stages.load(folder, dtype="float16")
    Stages.load(folder, dtype="bfloat16")


def test_the_start_up_line_names_the_products(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eesd_dist.model.kernels")
    Stages.load(_store(tmp_path, torch.bfloat16), dtype="bfloat16")
    lines = [text for text in caplog.messages if text.startswith("weights packed: ")]
    assert [line.split()[2] for line in lines] == ["layers=[0,1)", "layers=[1,3)"]
    product = LinearPacker(
        dtype="bfloat16", numerics="invariant", device=torch.device("cpu")
    ).candidates[0]
    used = f"products={product.name.replace(' ', '-')}"
    assert lines[0].endswith(f"dtype=bfloat16 computed_in=float32 {used}:4")
    assert lines[1].endswith(f"dtype=bfloat16 computed_in=float32 {used}:9")


def test_config_json_is_asked_before_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16"}))
    assert resolve_dtype("auto", tmp_path) == "float16"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no safetensors"):
        resolve_dtype("auto", tmp_path)
