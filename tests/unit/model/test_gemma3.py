"""Gemma 3's text model through the generic layers equals the model of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import CheckpointError
from eesd_dist.model.families.gemma3 import GEMMA3
from eesd_dist.model.heads.head_config import HeadKind, single_layer_config
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
from tests.unit.model.paged_stages import Stages

WINDOW = 21
FULL = {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}
SLIDING = {"rope_type": "default", "rope_theta": 10_000.0}
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "as it is": {},
    "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
    "one KV head, two layers of each kind in a row": {
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", *["full_attention"] * 2],
    },
}


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_spans_give_the_logits_of_transformers_past_the_window(
    tmp_path: Path, variant: str, numerics: Numerics
) -> None:
    model = eager(tmp_path, "gemma3", **VARIANTS[variant])
    require_logits_of_transformers(model, tmp_path, numerics=numerics)


def test_the_window_both_ropes_and_the_scales_matter_to_these_models(tmp_path: Path) -> None:
    tokens_BL = random_tokens(1, NUM_TOKENS)
    expected_BLV = logits_of(eager(tmp_path, "gemma3"), tokens_BL)
    changes: list[dict[str, object]] = [
        {"sliding_window": NUM_TOKENS},
        {"query_pre_attn_scalar": 4},
        {"rope_parameters": {"full_attention": SLIDING, "sliding_attention": SLIDING}},
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": FULL}},
    ]
    for change in changes:
        other_BLV = logits_of(eager(tmp_path, "gemma3", **change), tokens_BL)
        assert greatest_difference(other_BLV[:, WINDOW:], expected_BLV[:, WINDOW:]) > 0.1, change


def test_the_older_keys_mean_the_same(tmp_path: Path) -> None:
    model = eager(tmp_path, "gemma3", layer_types=["sliding_attention"] * 2 + ["full_attention"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        del config[key]
    config |= {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 3,
    }
    file.write_text(json.dumps(config))
    tokens_BL = random_tokens(1, NUM_TOKENS)
    logits_BLV = Stages.load(tmp_path).run_without_pages(tokens_BL)
    assert greatest_difference(logits_BLV, logits_of(model, tokens_BL)) <= 1e-4


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    require_logits_of_two_ranks(eager(tmp_path, "gemma3"), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_among_others(tmp_path: Path, dtype: DType) -> None:
    save_tiny_model(tmp_path, "gemma3")
    require_same_bits_in_a_batch(tmp_path, dtype)


@pytest.mark.parametrize("last", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
def test_a_new_head_has_the_rope_of_the_last_layer(
    tmp_path: Path, kind: HeadKind, last: str
) -> None:
    kinds = ["sliding_attention", "full_attention", last]
    require_new_head_is_the_target(eager(tmp_path, "gemma3", layer_types=kinds), tmp_path, kind)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_writes_what_the_rule_chooses_from_the_logits_of_transformers(
    served: Path, sampling: SamplingParams
) -> None:
    require_texts_of_the_rule(served, sampling, in_compiled_rounds=True)


# In the form of the published file for 1 billion weights.
PUBLISHED: Mapping[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
FILE = Path("config.json")


def test_the_published_config_passes_and_means_what_the_paper_says() -> None:
    spec = ModelSpec.from_config(PUBLISHED, file=FILE)
    assert spec.tie_word_embeddings
    assert spec.sliding_windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    frequencies = [rope.inverse_frequencies[1] for rope in spec.ropes[4:6]]
    expected = torch.tensor([1e4, 1e6]) ** (-1 / 128)
    torch.testing.assert_close(torch.tensor(frequencies), expected)
    assert spec.traits.embedding_scale == 1152**0.5
    assert spec.traits.scores.scale == 1 / 16
    last = ModelSpec.from_config(single_layer_config(PUBLISHED, spec), file=FILE)
    assert (last.sliding_windows, last.ropes) == ((512,), spec.ropes[-1:])
    unsaid = {key: value for key, value in PUBLISHED.items() if key not in GEMMA3.defaults}
    theirs = {"max_position_embeddings": 32768, "num_key_value_heads": 1, "sliding_window": 512}
    without = {"rope_theta": None, "rope_local_base_freq": None}
    assert ModelSpec.from_config({**unsaid, **theirs, **without}, file=FILE) == spec


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu', expected gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0, expected a positive number"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0, expected null"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0, expected null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "expected those of full_attention and sliding"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "long_factor": [1.0],
                    "short_factor": [1.0],
                }
            },
            "expected the same factors for all lengths",
        ),
        ({"model_type": "gemma3"}, "model_type = 'gemma3' with architecture Gemma3ForCausalLM"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        ModelSpec.from_config({**PUBLISHED, **change}, file=FILE)
