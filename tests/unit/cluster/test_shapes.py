import json
from pathlib import Path

import pytest

from cluster.planning.forecast import degrees_of
from cluster.planning.shapes import read_shape
from eesd_dist.errors import CheckpointError

FIELDS = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_a_shape_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    shape = read_shape(config)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)
    config.write_text(json.dumps({**FIELDS, "num_key_value_heads": 2, "head_dim": 32}))
    shape = read_shape(config)
    assert (shape.num_kv_heads, shape.head_dim) == (2, 32)


def test_tables_are_those_of_the_ropes_and_positions_that_are_computed(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    fields = {**FIELDS, "max_position_embeddings": 512}
    table = 512 * 8 * 8
    longrope = {"long_factor": [2.0], "short_factor": [1.0]}
    trained = {"original_max_position_embeddings": 128}
    for change, expected in (
        ({}, table),
        ({"model_type": "gemma3_text"}, 2 * table),
        ({"rope_scaling": longrope, **trained}, table // 4),
    ):
        config.write_text(json.dumps({**fields, **change}))
        assert read_shape(config).table_bytes == expected


def test_a_model_that_norms_its_heads_jointly_is_planned_for_one_rank(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for model_type, degrees in (("llama", (1, 2, 4)), ("olmo2", (1,))):
        config.write_text(json.dumps({**FIELDS, "model_type": model_type}))
        assert degrees_of(read_shape(config)) == degrees


def test_a_config_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        read_shape(config)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, 2),
        ({"torch_dtype": "float16"}, 2),
        ({"torch_dtype": "float32"}, 4),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, 2),
    ],
)
def test_weights_are_as_wide_as_the_checkpoint_says(
    tmp_path: Path, said: dict[str, str], expected: int
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**FIELDS, **said}))
    shape = read_shape(config)
    assert (shape.bytes_per_weight, shape.bytes_per_kv) == (expected, expected)
    shape = read_shape(config, on_cpu=True)
    assert (shape.bytes_per_weight, shape.bytes_per_kv) == (expected, 4)
