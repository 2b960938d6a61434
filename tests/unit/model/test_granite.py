"""Granite through the generic layers equals the model of transformers."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import CheckpointError
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import SamplingParams
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.family_checks import (
    GREEDY,
    NUM_TOKENS,
    SEEDED,
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

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("changes", [{}, BIASES], ids=["tied", "biases"])
def test_two_spans_give_the_logits_of_transformers(
    tmp_path: Path, changes: dict[str, object], numerics: Numerics
) -> None:
    model = eager(tmp_path, "granite", **changes)
    require_logits_of_transformers(model, tmp_path, numerics=numerics)


def test_each_multiplier_matters_to_these_models(tmp_path: Path) -> None:
    tokens_BL = random_tokens(1, NUM_TOKENS)
    expected_BLV = logits_of(eager(tmp_path, "granite"), tokens_BL)
    for key in MULTIPLIERS:
        other_BLV = logits_of(eager(tmp_path, "granite", **{key: 1.0}), tokens_BL)
        assert greatest_difference(other_BLV, expected_BLV) > 0.1, key


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    require_logits_of_two_ranks(eager(tmp_path, "granite", **BIASES), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_among_others(tmp_path: Path, dtype: DType) -> None:
    save_tiny_model(tmp_path, "granite")
    require_same_bits_in_a_batch(tmp_path, dtype)


@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
def test_a_new_head_on_the_last_but_one_layer_is_the_target(tmp_path: Path, kind: HeadKind) -> None:
    require_new_head_is_the_target(eager(tmp_path, "granite"), tmp_path, kind)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("granite"), "granite", logits_scaling=0.3)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_writes_what_the_rule_chooses_from_the_logits_of_transformers(
    served: Path, sampling: SamplingParams
) -> None:
    require_texts_of_the_rule(served, sampling, in_compiled_rounds=True)


# In the form of the published file for 8 billion weights.
PUBLISHED: Mapping[str, object] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.47.0",
    "use_cache": True,
    "vocab_size": 49155,
}
FILE = Path("config.json")


def test_the_published_config_passes() -> None:
    traits = ModelSpec.from_config(PUBLISHED, file=FILE).traits
    assert traits.scores.scale == 1 / 128  # not 1 / sqrt(128), the default
    assert (traits.embedding_scale, traits.residual_scale) == (12.0, 0.22)
    assert traits.logits_scale == 1 / 16


def test_multipliers_that_the_file_does_not_have_are_one() -> None:
    unsaid = {key: value for key, value in PUBLISHED.items() if key not in MULTIPLIERS}
    traits = ModelSpec.from_config(unsaid, file=FILE).traits
    scales = (traits.embedding_scale, traits.residual_scale, traits.logits_scale)
    assert (traits.scores.scale, *scales) == (1.0,) * 4


@pytest.mark.parametrize("key", MULTIPLIERS)
@pytest.mark.parametrize("value", [0, -0.22, "12"])
def test_a_multiplier_that_is_no_positive_number_is_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{key} = {value!r}, expected a positive number"):
        ModelSpec.from_config({**PUBLISHED, key: value}, file=FILE)
