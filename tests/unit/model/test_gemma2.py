"""Gemma 2 through the generic layers equals the model of transformers."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import CheckpointError
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.families.gemma2 import GEMMA2
from eesd_dist.model.heads.head_config import HeadKind, single_layer_config
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import SamplingParams
from tests.support.fake_cuda import GPU, HostCopies, fake_cuda
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
from tests.unit.model.test_fake_cuda import span_of

WINDOW = 21
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "as it is": {},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
    "one KV head, other windows": {
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_spans_give_the_logits_of_transformers_past_the_window(
    tmp_path: Path, variant: str, numerics: Numerics
) -> None:
    model = eager(tmp_path, "gemma2", **VARIANTS[variant])
    require_logits_of_transformers(model, tmp_path, numerics=numerics)


def test_the_window_and_both_caps_matter_to_these_models(tmp_path: Path) -> None:
    tokens_BL = random_tokens(1, NUM_TOKENS)
    expected_BLV = logits_of(eager(tmp_path, "gemma2"), tokens_BL)
    assert float(expected_BLV.abs().max()) > 2.0  # with a cap at 4, tanh is far from its argument
    for change in (
        {"sliding_window": NUM_TOKENS},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
    ):
        other_BLV = logits_of(eager(tmp_path, "gemma2", **change), tokens_BL)
        assert greatest_difference(other_BLV[:, WINDOW:], expected_BLV[:, WINDOW:]) > 0.1, change


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    require_logits_of_two_ranks(eager(tmp_path, "gemma2"), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 6, "num_key_value_heads": 4}], ids=["", "6"])
def test_a_row_has_the_same_bits_alone_and_among_others(
    tmp_path: Path, dtype: DType, sizes: dict[str, object]
) -> None:
    save_tiny_model(tmp_path, "gemma2", **sizes)
    require_same_bits_in_a_batch(tmp_path, dtype)


@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
def test_a_new_head_on_the_last_but_one_layer_is_the_target(tmp_path: Path, kind: HeadKind) -> None:
    model = eager(tmp_path, "gemma2")
    assert ModelSpec.from_folder(tmp_path).sliding_windows == (WINDOW, None, WINDOW)
    require_new_head_is_the_target(model, tmp_path, kind)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("gemma2"), "gemma2", final_logit_softcapping=9.0)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_writes_what_the_rule_chooses_from_the_logits_of_transformers(
    served: Path, sampling: SamplingParams
) -> None:
    require_texts_of_the_rule(served, sampling, in_compiled_rounds=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_span_and_its_logits_stay_on_the_gpu(tmp_path: Path, dtype: DType) -> None:
    save_tiny_model(tmp_path, "gemma2")
    spec = ModelSpec.from_folder(tmp_path)
    with fake_cuda():
        span = span_of(tmp_path, spec, dtype)
        with HostCopies() as copies, torch.inference_mode():
            rows = RowPlan.build(
                [RowSegment(20, 25, (1, 2, 3))], page_size=16, device=GPU, numerics="invariant"
            )
            logits_TV = span.logits(span.forward(span.embed(torch.arange(25, device=GPU)), rows))
        assert (logits_TV.device, logits_TV.shape) == (GPU, (25, 96))
        assert copies.to_the_host == []


# In the form of the published files for 2 and 27 billion weights.
PUBLISHED: Mapping[str, object] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
LARGE = {
    "_attn_implementation": "eager",
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "sliding_window_size": 4096,
}
FILE = Path("config.json")


def test_the_published_configs_pass_and_mean_what_the_paper_says() -> None:
    small = ModelSpec.from_config(PUBLISHED, file=FILE)
    assert small.tie_word_embeddings
    assert small.sliding_windows == (4096, None) * 13
    assert small.traits.embedding_scale == 48.0
    assert (small.traits.scores.scale, small.traits.scores.softcap) == (1 / 16, 50.0)
    assert small.traits.logit_softcap == 30.0
    large = ModelSpec.from_config({**PUBLISHED, **LARGE}, file=FILE)
    assert large.traits.scores.scale == 1 / 12
    last = ModelSpec.from_config(single_layer_config(PUBLISHED, small), file=FILE)
    assert last.sliding_windows == (None,)
    unsaid = {key: value for key, value in PUBLISHED.items() if key not in GEMMA2.defaults}
    assert ModelSpec.from_config(unsaid, file=FILE) == small


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu', expected gelu_pytorch_tanh"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu', expected gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0, expected a positive number"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping = -1"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"model_type": "gemma"}, "model_type = 'gemma' with architecture Gemma2ForCausalLM"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        ModelSpec.from_config({**PUBLISHED, **change}, file=FILE)
