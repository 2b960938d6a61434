"""An invalid folder is refused with file, found and expected."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.parallel import Shard
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import Stages


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "one of LlamaForCausalLM"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide'"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**8 + 1}, "a positive integer, at most 100000000"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_config_we_would_compute_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    save_tiny_model(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=says) as refusal:
        ModelSpec.from_folder(tmp_path)
    assert str(tmp_path / "config.json") in str(refusal.value)


@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelSpec.from_folder(tmp_path)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (2, 9)
    (tmp_path / "generation_config.json").unlink()
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (2,)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        Stages.load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    edit_config(tmp_path, intermediate_size=88)
    with pytest.raises(CheckpointError, match=r"gate_proj.*\(96, 64\).*\(88, 64\)"):
        Stages.load(tmp_path)


def test_a_tensor_of_integers_is_not_taken_for_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of type I8"):
        Stages.load(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cut short"):
        Stages.load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        Stages.load(tmp_path)


def test_a_shard_without_the_tensor_the_index_promises_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    name = "model.norm.weight"
    content["weight_map"][name] = next(f for f in files if f != content["weight_map"][name])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"no tensor model\.norm\.weight"):
        Stages.load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        Stages.load(tmp_path)


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"3 .*ranks cannot share evenly the 4 .*one of 1, 2, 4$"):
        Shard.of(spec, rank=0, size=3)


def test_a_span_reads_no_tensor_of_other_layers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    subset = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(("model.layers.0.", "model.embed"))
    }
    save_file(subset, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\."):
        Stages.load(tmp_path, cut=1)
