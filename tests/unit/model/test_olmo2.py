"""OLMo 2 through the generic layers equals the model of transformers."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.parallel import Shard
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import SamplingParams
from tests.support.stepwise_cpu import stepwise_layers
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.family_checks import (
    EXIT_LAYER,
    GREEDY,
    NUM_TOKENS,
    SEEDED,
    eager,
    greatest_difference,
    logits_of,
    random_tokens,
    require_logits_of_transformers,
    require_new_head_is_the_target,
    require_same_bits_in_a_batch,
    require_texts_of_the_rule,
    write_served,
)

VARIANTS: Mapping[str, Mapping[str, object]] = {
    "as it is": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
    "one KV head per head": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_spans_give_the_logits_of_transformers(
    tmp_path: Path, variant: str, numerics: Numerics
) -> None:
    model = eager(tmp_path, "olmo2", **VARIANTS[variant])
    require_logits_of_transformers(model, tmp_path, numerics=numerics)


@torch.no_grad()
def test_the_norms_of_queries_and_keys_matter_head_by_head(tmp_path: Path) -> None:
    model = eager(tmp_path, "olmo2")
    tokens_BL = random_tokens(1, NUM_TOKENS)
    expected_BLV = logits_of(model, tokens_BL)
    for name in ("q_norm", "k_norm"):
        weight_D = getattr(model.model.layers[0].self_attn, name).weight
        before_D = weight_D.clone()
        weight_D.copy_(weight_D.roll(16))  # each head has the weights of another one
        assert greatest_difference(logits_of(model, tokens_BL), expected_BLV) > 0.1, name
        weight_D.copy_(before_D)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_row_has_the_same_bits_alone_and_among_others(
    tmp_path: Path, dtype: DType, is_compiled: bool
) -> None:
    save_tiny_model(tmp_path, "olmo2")
    with nullcontext() if is_compiled else stepwise_layers():
        require_same_bits_in_a_batch(tmp_path, dtype)


@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
def test_a_new_head_on_the_last_but_one_layer_is_the_target(tmp_path: Path, kind: HeadKind) -> None:
    require_new_head_is_the_target(eager(tmp_path, "olmo2"), tmp_path, kind)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("olmo2"), "olmo2")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_writes_what_the_rule_chooses_from_the_logits_of_transformers(
    served: Path, sampling: SamplingParams
) -> None:
    require_texts_of_the_rule(served, sampling, in_compiled_rounds=True)


def test_several_ranks_are_refused_for_the_model_and_its_head(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "olmo2")
    spec = ModelSpec.from_folder(tmp_path)
    head = TrainableExitHead.from_target(tmp_path, spec, EXIT_LAYER)
    for layer_spec in (spec, head.config.layer):
        assert Shard.of(layer_spec, rank=0, size=1).heads == range(4)
        with pytest.raises(
            ConfigError, match=r"2 tensor-parallel ranks for Olmo2.*choose one rank"
        ):
            Shard.of(layer_spec, rank=0, size=2)


# In the form of the published file for 7 billion weights.
PUBLISHED: Mapping[str, object] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "use_cache": True,
    "vocab_size": 100352,
}
FILE = Path("config.json")


def test_the_published_config_passes() -> None:
    spec = ModelSpec.from_config(PUBLISHED, file=FILE)
    assert spec.rms_norm_eps == 1e-6
    assert list(spec.traits.norms.names()) == ["attention_post_norm", "mlp_post_norm"]
    unsaid = {key: value for key, value in PUBLISHED.items() if key != "rms_norm_eps"}
    assert ModelSpec.from_config(unsaid, file=FILE).rms_norm_eps == 1e-5


@pytest.mark.parametrize("change", [{"clip_qkv": 8.0}, {"layer_types": ["sliding_attention"] * 32}])
def test_what_is_not_computed_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        ModelSpec.from_config({**PUBLISHED, **change}, file=FILE)
