import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from cluster.planning.checkpoint import EVALUATION_FILE, read_head, read_shape
from cluster.planning.forecast import degrees_of
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.distill import evaluate
from eesd_dist.errors import CheckpointError, ConfigError

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 128,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_a_shape_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    shape = read_shape(tmp_path)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)
    config.write_text(json.dumps({**FIELDS, "num_key_value_heads": 2, "head_dim": 32}))
    shape = read_shape(tmp_path)
    assert (shape.num_kv_heads, shape.head_dim) == (2, 32)


def test_tables_are_those_of_the_ropes_and_positions_that_are_computed(tmp_path: Path) -> None:
    fields = {**FIELDS, "max_position_embeddings": 512}
    table = 512 * 8 * 8
    longrope = {"type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    trained = {"original_max_position_embeddings": 128}
    gemma = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window_pattern": 2}
    phi = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": longrope, **trained}
    for change, expected in (({}, table), (gemma, 2 * table), (phi, table // 4)):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
        assert read_shape(tmp_path).table_bytes == expected


def test_a_model_that_norms_its_heads_jointly_is_planned_for_one_rank(tmp_path: Path) -> None:
    for name, degrees in (("Llama", (1, 2, 4)), ("Olmo2", (1,))):
        fields = {**FIELDS, "architectures": [f"{name}ForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert degrees_of(read_shape(tmp_path)) == degrees


def test_a_config_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(CheckpointError, match="architectures"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 2),
        ({"torch_dtype": "float16"}, 2),
        ({"torch_dtype": "float32"}, 4),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, 2),
    ],
)
def test_weights_are_as_wide_as_the_checkpoint_says(
    tmp_path: Path, fields: dict[str, str], expected: int
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**FIELDS, **fields}))
    shape = read_shape(tmp_path)
    assert (shape.bytes_per_weight, shape.bytes_per_kv) == (expected, expected)


def _head(folder: Path, *rates: tuple[float, float]) -> Path:
    """Returns a copy of the bundled head with the evaluation of these temperatures and rates."""
    shutil.copy(BUNDLED_MODEL / "exit_head" / "config.json", folder)
    temperatures = tuple(
        evaluate.AtTemperature(
            temperature=temperature,
            acceptance=evaluate.Acceptance(
                num_rounds=10,
                num_judged=20,
                rate=rate,
                by_position=(0.8, 0.5, 0.0, 0.0),
                tokens_per_round=2.2,
            ),
            by_class={},
            likeness=evaluate.Likeness(num_positions=20, agreement=0.7, one_minus_tv=0.6),
            likeness_by_class={},
            prediction=None,
            speed=None,
        )
        for temperature, rate in rates
    )
    report = evaluate.Evaluation(
        exit_layer=1,
        head_kind="truncated",
        num_parameters=1,
        temperatures=temperatures,
        speed=None,
        cost_model=None,
    )
    (folder / evaluate.EVALUATION_FILE).write_text(json.dumps(asdict(report)))
    return folder


def test_the_acceptance_of_a_head_is_what_its_evaluation_has(tmp_path: Path) -> None:
    assert evaluate.EVALUATION_FILE == EVALUATION_FILE
    folder = _head(tmp_path, (0.0, 0.9), (1.0, 0.65))
    head = read_head(folder, model=BUNDLED_MODEL, temperature=1.0)
    assert (head.exit_layer, head.draft_vocab_size) == (1, 2048)
    assert (head.acceptance.rate, head.acceptance.is_measured) == (0.65, True)
    # No round has tested the third position.
    assert head.acceptance.survival == pytest.approx((0.8, 0.4))
    assert read_head(folder, model=BUNDLED_MODEL, temperature=0.0).acceptance.rate == 0.9


def test_a_head_without_that_measurement_is_refused(tmp_path: Path) -> None:
    folder = _head(tmp_path, (0.0, 0.9), (0.7, 0.8))
    with pytest.raises(ConfigError, match=r"temperatures 0, 0.7, expected one at 1: choose"):
        read_head(folder, model=BUNDLED_MODEL, temperature=1.0)
    (folder / EVALUATION_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="measure it with `eesd distill evaluate`"):
        read_head(folder, model=BUNDLED_MODEL, temperature=1.0)
    (folder / EVALUATION_FILE).unlink()
    with pytest.raises(ConfigError, match=r"No such file.*measure it with `eesd distill evaluate`"):
        read_head(folder, model=BUNDLED_MODEL, temperature=1.0)
