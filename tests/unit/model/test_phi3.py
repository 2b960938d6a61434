"""Phi-3 and Phi-4-mini through the generic layers equal the model of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eesd_dist.config import DType, EngineConfig, Numerics
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import CheckpointError
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.max_len import max_model_len_of
from eesd_dist.model.rope import interleave_pairs, rotation_table, separate_pairs
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import SamplingParams
from tests.support.tiny_checkpoints import FAMILIES, save_tiny_model
from tests.unit.model.family_checks import (
    EXIT_LAYER,
    GREEDY,
    NUM_TOKENS,
    SEEDED,
    TOLERANCE,
    eager,
    greatest_difference,
    logits_of,
    random_tokens,
    require_logits_of_transformers,
    require_logits_of_two_ranks,
    require_new_head_is_the_target,
    require_same_bits_in_a_batch,
    require_texts_of_the_rule,
    write_served,
)
from tests.unit.model.paged_stages import Stages

LONGROPE = "phi3, longrope in a part of each head"
WINDOW = 21
ROPE: Mapping[str, object] = FAMILIES[LONGROPE]["rope_parameters"]  # type: ignore[assignment]


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("family", ["phi3", LONGROPE])
def test_two_spans_give_the_logits_of_transformers(
    tmp_path: Path, family: str, numerics: Numerics
) -> None:
    require_logits_of_transformers(eager(tmp_path, family), tmp_path, numerics=numerics)


def test_the_window_the_factors_and_the_rotated_part_matter_to_these_models(
    tmp_path: Path,
) -> None:
    tokens_BL = random_tokens(1, NUM_TOKENS)
    plain_BLV = logits_of(eager(tmp_path, "phi3"), tokens_BL)
    other_BLV = logits_of(eager(tmp_path, "phi3", sliding_window=None), tokens_BL)
    assert greatest_difference(other_BLV[:, WINDOW:], plain_BLV[:, WINDOW:]) > 0.1
    expected_BLV = logits_of(eager(tmp_path, LONGROPE), tokens_BL)
    eight = [*ROPE["short_factor"], 3.5, 4.0]  # type: ignore[misc]
    for change in (
        {"short_factor": [1.0] * 6},
        {"attention_factor": 1.0},
        {"partial_rotary_factor": 1.0, "short_factor": eight, "long_factor": eight},
    ):
        model = eager(tmp_path, LONGROPE, rope_parameters={**ROPE, **change})
        assert greatest_difference(logits_of(model, tokens_BL), expected_BLV) > 0.1, change


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    require_logits_of_two_ranks(eager(tmp_path, LONGROPE), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_among_others(tmp_path: Path, dtype: DType) -> None:
    save_tiny_model(tmp_path, LONGROPE)
    require_same_bits_in_a_batch(tmp_path, dtype)


@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
def test_a_new_head_on_the_last_but_one_layer_is_the_target(tmp_path: Path, kind: HeadKind) -> None:
    require_new_head_is_the_target(eager(tmp_path, LONGROPE), tmp_path, kind)


def test_a_head_has_the_fused_matrices_of_its_target(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, LONGROPE)
    spec = ModelSpec.from_folder(tmp_path)
    head = TrainableExitHead.from_target(tmp_path, spec, EXIT_LAYER)
    stored = head.layer.checkpoint_tensors("model.layers.2.")
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {name for name in tensors if name.startswith("model.layers.2.")}
    assert "model.layers.2.self_attn.qkv_proj.weight" in stored
    assert all(torch.equal(stored[name], tensors[name]) for name in stored)


@pytest.fixture(scope="module", params=["phi3", LONGROPE])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("phi3"), request.param)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_writes_what_the_rule_chooses_from_the_logits_of_transformers(
    served: Path, sampling: SamplingParams
) -> None:
    require_texts_of_the_rule(served, sampling, in_compiled_rounds=True)


def test_positions_end_where_transformers_changes_to_the_long_factors(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    short = {"original_max_position_embeddings": 64}
    rope = {**ROPE, **short}
    model = eager(folder, LONGROPE, rope_parameters=rope, **short)
    config = EngineConfig.model_validate(
        {"model": {"path": str(folder), "head": None}, "cache": {"num_pages": 512}}
    )
    assert max_model_len_of(config) == layout_of(config).max_model_len == 64
    assert ModelSpec.from_folder(folder).max_position_embeddings == 64
    tokens_BL = random_tokens(1, NUM_TOKENS)
    expected_BLV = logits_of(model, tokens_BL[:, :64])
    logits_BLV = Stages.load(folder).run_without_pages(tokens_BL[:, :64])
    assert greatest_difference(logits_BLV, expected_BLV) <= TOLERANCE
    changed_BLV = logits_of(model, tokens_BL)[:, :64]  # keys of all positions, rotated again
    assert greatest_difference(changed_BLV, expected_BLV) > 0.1


def test_equal_factors_have_all_positions(tmp_path: Path) -> None:
    long = ROPE["long_factor"]
    trained = {"original_max_position_embeddings": 64}
    rope = {**ROPE, **trained, "short_factor": long}
    model = eager(tmp_path, LONGROPE, rope_parameters=rope, **trained)
    assert ModelSpec.from_folder(tmp_path).max_position_embeddings == 256
    require_logits_of_transformers(model, tmp_path, numerics="invariant")  # 75 tokens


@pytest.mark.parametrize("share", [1.0, 0.75, 0.25])
def test_pairs_are_put_side_by_side_and_back(share: float) -> None:
    config = {**PUBLISHED, "partial_rotary_factor": share, "rope_scaling": None}
    rope = ModelSpec.from_config(config, file=FILE).ropes[0]
    rows = torch.arange(3 * 128 * 2).view(3 * 128, 2)
    ordered = interleave_pairs(rows, rope)
    assert torch.equal(separate_pairs(ordered, rope), rows)
    turned = int(128 * share)
    assert ordered[:4, 0].tolist() == [0, turned, 2, turned + 2]
    assert torch.equal(ordered[turned:128], rows[turned:128])
    table = rotation_table(rope, num_positions=5, device=torch.device("cpu"))
    assert table.shape == (5, 64)
    assert bool((table[:, turned // 2 :] == 1).all())
    assert not bool((table[1:, : turned // 2] == 1).any())


# In the form of the published file of Phi-4-mini, with other factors.
PUBLISHED: Mapping[str, object] = {
    "_name_or_path": "Phi-4-mini-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    "bos_token_id": 199999,
    "embd_pdrop": 0.0,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1 + at / 2 for at in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 200064,
}
FILE = Path("config.json")


def test_the_published_config_passes() -> None:
    spec = ModelSpec.from_config(PUBLISHED, file=FILE)
    assert spec.ropes[0].rotary_dim == 96
    assert spec.ropes[0].attention_scaling == pytest.approx((1 + 5 / 12) ** 0.5)
    assert spec.max_position_embeddings == 4096
    assert spec.sliding_windows == (262144,) * 32
    early = {**PUBLISHED, "rope_scaling": {**PUBLISHED["rope_scaling"], "type": "su"}}  # type: ignore[dict-item]
    del early["sliding_window"]
    early["auto_map"] = {"AutoModelForCausalLM": "microsoft/Phi-3--modeling_phi3.Phi3ForCausalLM"}
    assert ModelSpec.from_config(early, file=FILE).sliding_windows == (None,) * 32
    assert ModelSpec.from_config(early, file=FILE).ropes == spec.ropes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"partial_rotary_factor": 0.7578125}, "an even number of the 128 channels"),  # 97
        ({"partial_rotary_factor": 1.5}, "a share from 0 to 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "expected rope type default or longr"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings = None"),
        ({"full_attn_mod": 2}, "full_attn_mod = 2, expected 1"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "code that comes with the model"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}}, "long_factor None"),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 64,
                    "long_factor": [1.0] * 64,
                }
            },
            "expected 48 positive numbers, one for each rotated pair",
        ),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        ModelSpec.from_config({**PUBLISHED, **change}, file=FILE)


def test_a_part_of_each_head_is_refused_in_other_families(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "partial_rotary_factor": 0.5}
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor 0\.5, expected 1\.0"):
        ModelSpec.from_config(config, file=file)
