"""Every key of a config.json is read, known to be harmless, or refused."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import check_model
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.config_keys import (
    HARMLESS,
    HARMLESS_ROPE,
    READ,
    READ_BY_ROPE_TYPE,
    READ_ROPE,
    REFUSED,
    REFUSED_ROPE,
)
from eesd_dist.model.families import FAMILIES
from eesd_dist.model.heads.head_config import single_layer_config
from eesd_dist.model.max_len import max_model_len_of
from eesd_dist.model.spec import ModelSpec
from serve_app.pipeline.recorder import new_manifest
from tests.support.tiny_service import write_tiny_service

MODEL_TYPES = {
    architecture: model_type
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if architecture in FAMILIES and model_type in FAMILIES[architecture].model_types
}
"""`model_type` by architecture, as in transformers."""
FILE = Path("model/config.json")
SIZES: Mapping[str, object] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def spec_of(architecture: str, **changes: object) -> ModelSpec:
    config = {**SIZES, "architectures": [architecture], **changes}
    return ModelSpec.from_config(config, file=FILE)


def keys_of(model_type: str) -> set[str]:
    """Returns the keys that the configuration class declares, has by default, or removes from its
    input."""
    kind = CONFIG_MAPPING[model_type]
    popped = {
        "_commit_hash",
        "attn_implementation",
        "experts_implementation",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "partial_rotary_factor",
        "per_layer_config",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
    }
    fields = {field.name for field in dataclasses.fields(kind)}
    return fields | set(kind().to_dict()) | popped


def test_every_architecture_goes_with_the_model_type_that_transformers_has_for_it() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)
    expected = {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "MinistralForCausalLM": "ministral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
    }
    assert expected.items() <= MODEL_TYPES.items()


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_each_key_of_transformers_is_in_one_list(architecture: str) -> None:
    own = FAMILIES[architecture].keys
    lists = [READ | own, HARMLESS, frozenset(REFUSED) - own]
    keys = keys_of(MODEL_TYPES[architecture])
    assert len(keys) > 25
    counts = {key: sum(key in group for group in lists) for key in keys}
    assert counts == dict.fromkeys(keys, 1), "a new key of transformers wants a list"


def test_no_key_is_in_two_lists() -> None:
    for family in FAMILIES.values():
        assert not READ & family.keys
        assert not family.keys & HARMLESS
    assert not READ & (HARMLESS | set(REFUSED))
    assert not HARMLESS & set(REFUSED)


def test_defaults_for_generation_are_harmless() -> None:
    assert set(GenerationConfig._get_default_generation_params()) <= HARMLESS


def test_each_rope_parameter_of_transformers_is_in_one_list() -> None:
    read = READ_ROPE.union(*READ_BY_ROPE_TYPE.values())
    for key in RopeParameters.__annotations__:
        assert (key in read) + (key in REFUSED_ROPE) == 1, key
    assert not (read | HARMLESS_ROPE) & set(REFUSED_ROPE)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_what_transformers_writes_for_each_family_passes(architecture: str) -> None:
    written: PreTrainedConfig = CONFIG_MAPPING[MODEL_TYPES[architecture]](**SIZES, dtype="bfloat16")
    config = json.loads(written.to_json_string(use_diff=False))
    spec = ModelSpec.from_config({**config, "architectures": [architecture]}, file=FILE)
    assert spec.num_layers == 4


VALUES: Mapping[str, object] = {
    "add_cross_attention": True,
    "attention_chunk_size": 8192,
    "attention_multiplier": 0.015625,
    "attn_logit_softcapping": 50.0,
    "cross_attention_hidden_size": 64,
    "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "full_attn_mod": 2,
    "interpolate_factor": 4,
    "is_causal": False,
    "is_encoder_decoder": True,
    "llama_4_scaling_beta": 0.1,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "no_rope_layers": [1, 1, 1, 0],
    "per_layer_config": {"0": {"intermediate_size": 32}},
    "pruned_heads": {"0": [1]},
    "residual_multiplier": 0.22,
    "scale_attn_weights": False,
    "tie_encoder_decoder": True,
    "use_bidirectional_attention": True,
    "use_rope": False,
}


@pytest.mark.parametrize(
    ("architecture", "key"),
    [(name, key) for name in MODEL_TYPES for key in REFUSED if key not in FAMILIES[name].keys],
)
def test_a_key_that_would_change_the_logits_is_refused(architecture: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model/config\.json: found {key} = .*expected "):
        spec_of(architecture, **{key: VALUES[key]})
    unchanged = spec_of(architecture)
    assert spec_of(architecture, **{key: REFUSED[key]}) == unchanged
    assert spec_of(architecture, **{key: None}) == unchanged


@pytest.mark.parametrize("key", REFUSED_ROPE)
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_a_rope_parameter_that_is_not_computed_is_refused(where: str, key: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    with pytest.raises(CheckpointError, match=rf"config\.json: found {key} = .*rope type yarn"):
        spec_of("LlamaForCausalLM", **{where: {**yarn, key: [1.0, 2.0]}})
    with_null = spec_of("LlamaForCausalLM", **{where: {**yarn, key: None}})
    assert with_null == spec_of("LlamaForCausalLM", **{where: yarn})


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"rope_type": "default", "factor": 8.0}, "factor = 8.0"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 16}, "beta_fast = 16"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha = 1000.0"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention = "),
    ],
)
def test_a_rope_parameter_of_another_type_is_refused(
    parameters: dict[str, object], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        spec_of("LlamaForCausalLM", rope_parameters=parameters)


def test_unknown_keys_are_refused_by_name_all_at_once() -> None:
    with pytest.raises(CheckpointError) as refusal:
        spec_of("Qwen3ForCausalLM", mup_scale=2.0, novel={"a": 1}, unused=None, off=False)
    message = str(refusal.value)
    assert "model/config.json: found mup_scale = 2.0, novel = {'a': 1}, expected keys" in message
    assert "name the key in model.ignore_config_keys, or remove it from the file" in message
    assert "unused" not in message


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_that_is_switched_off_passes(value: object) -> None:
    assert spec_of("LlamaForCausalLM", novel=value) == spec_of("LlamaForCausalLM")


@pytest.mark.parametrize("value", [0, 0.0, 1, True, [0], ["text", 0], {"novel": "text"}])
def test_an_unknown_key_with_a_number_a_switch_or_an_object_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="novel"):
        spec_of("LlamaForCausalLM", novel=value)
    ignoring = ModelSpec.from_config(
        {**SIZES, "architectures": ["LlamaForCausalLM"], "novel": value},
        file=FILE,
        ignored_keys=["novel"],
    )
    assert ignoring == spec_of("LlamaForCausalLM")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("padding_side", "left"),
        ("company", ["Example", "Corp"]),
        ("_model_name_or_path", "example/model"),
        ("_num_merged", 2),
    ],
)
@pytest.mark.parametrize("is_of_rope", [False, True])
def test_an_unknown_key_that_only_describes_is_named_in_one_warning(
    key: str, value: object, is_of_rope: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {**SIZES, "architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "default"}}
    described = plain | (
        {"rope_scaling": {"type": "default", key: value}} if is_of_rope else {key: value}
    )
    file = tmp_path / "config.json"
    for _ in range(2):
        spec = ModelSpec.from_config(described, file=file)
        assert spec == ModelSpec.from_config(plain, file=file)
    (message,) = [text for text in caplog.messages if text.startswith("unknown keys")]
    assert message == f"unknown keys are ignored: file={file} keys={key} = {value!r}"


def test_ignored_keys_pass_where_the_file_or_its_rope_has_them() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "rope_scaling": yarn}
    odd = {**config, "logits_scaling": 8.0, "rope_scaling": {**yarn, "alpha": 1000.0}}
    ignoring = ModelSpec.from_config(odd, file=FILE, ignored_keys=("alpha", "logits_scaling"))
    assert ignoring == ModelSpec.from_config(config, file=FILE)


def test_a_key_that_is_read_cannot_be_ignored() -> None:
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "mlp_bias": True}
    with pytest.raises(ConfigError, match=r"ignore_config_keys: found mlp_bias, rope_theta, exp"):
        ModelSpec.from_config(config, file=FILE, ignored_keys=("rope_theta", "mlp_bias", "other"))


@pytest.mark.parametrize("has_length", [True, False])
def test_the_setting_reaches_every_reader_of_the_file(tmp_path: Path, has_length: bool) -> None:
    folder = write_tiny_service(tmp_path / "tiny")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if not has_length:
        del config["max_position_embeddings"]
    file.write_text(json.dumps({**config, "novel": 3}))
    model: dict[str, object] = {"path": str(folder), "head": None}
    shutil.rmtree(folder / "exit_head")
    with pytest.raises(CheckpointError, match=r"novel = 3.*model\.ignore_config_keys"):
        check_model(EngineConfig.model_validate({"model": model}))
    ignoring = EngineConfig.model_validate({"model": {**model, "ignore_config_keys": ["novel"]}})
    check_model(ignoring)
    assert max_model_len_of(ignoring) == (4096 if has_length else 2048)
    assert new_manifest(ignoring, top_k=8).verifier.vocab_size == 320


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("LlamaForCausalLM", "sliding_window", 4096),
        ("MistralForCausalLM", "attention_bias", True),
        ("MistralForCausalLM", "use_sliding_window", True),
        ("Qwen2ForCausalLM", "mlp_bias", True),
    ],
)
def test_a_key_of_another_family_is_refused(architecture: str, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{key} = {value}"):
        spec_of(architecture, **{key: value})


def test_a_model_that_brings_its_own_code_is_refused() -> None:
    code = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    with pytest.raises(CheckpointError, match=r"auto_map.*code that comes with the model"):
        spec_of("LlamaForCausalLM", auto_map=code)
    tokenizer_only = {"AutoTokenizer": ["tokenization_x.X", None]}
    assert spec_of("LlamaForCausalLM", auto_map=tokenizer_only) == spec_of("LlamaForCausalLM")


def test_a_model_type_of_another_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model_type = 'granite' with .*Llama.*expected"):
        spec_of("LlamaForCausalLM", model_type="granite")


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeForCausalLM",
        "Llama4ForConditionalGeneration",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "PhiMoEForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    ],
)
def test_a_mixture_of_experts_is_refused_by_name(architecture: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        spec_of(architecture)
    text = str(refusal.value)
    assert f"config.json: found {architecture}, which is a mixture of experts" in text
    assert "expected a dense model, one of LlamaForCausalLM, " in text
    assert "choose a dense model" in text


@pytest.mark.parametrize("model_type", ["dots1", "ernie4_5_moe", "jamba", "minimax", "solar_open"])
def test_experts_in_the_file_show_a_mixture_of_another_name(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](
        **({"n_routed_experts": 8} if model_type == "dots1" else {})
    )
    written = {**config.to_dict(), "architectures": ["XForCausalLM"]}
    with pytest.raises(CheckpointError, match="XForCausalLM, which is a mixture of experts"):
        ModelSpec.from_config(written, file=FILE)


@pytest.mark.parametrize("count", [{}, {"num_experts": None}, {"num_local_experts": 1}])
def test_another_architecture_is_not_called_a_mixture(count: dict[str, object]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        spec_of("GPT2LMHeadModel", **count)
    assert "found architectures ['GPT2LMHeadModel'], expected one of" in str(refusal.value)
    assert "mixture" not in str(refusal.value)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MinistralForCausalLM"])
def test_windows_follow_layer_types(architecture: str) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = {**SIZES, "architectures": [architecture], "sliding_window": 32, "layer_types": kinds}
    spec = ModelSpec.from_config(config, file=FILE)
    assert spec.sliding_windows == (None, 32, 32, None)
    last_layer = ModelSpec.from_config(single_layer_config(config, spec), file=FILE)
    assert last_layer.sliding_windows == (None,)
    assert spec_of(architecture, sliding_window=32).sliding_windows == (32,) * 4
    assert spec_of(architecture).sliding_windows == (4096,) * 4
    assert spec_of(architecture, sliding_window=None).sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False}),
        ("LlamaForCausalLM", {}),
    ],
)
def test_a_sliding_layer_without_a_window_is_refused(
    architecture: str, changes: dict[str, object]
) -> None:
    kinds = ["sliding_attention", *["full_attention"] * 3]
    with pytest.raises(CheckpointError, match=r"layer_types.*no window is configured"):
        spec_of(architecture, layer_types=kinds, **changes)
    spec = spec_of(architecture, layer_types=["full_attention"] * 4, **changes)
    assert spec.sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    "kinds", [["full_attention"], ["chunked_attention"] * 4, "full_attention", [["x"]] * 4]
)
def test_other_layer_types_are_refused(kinds: object) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types.*expected 4 of full_attention"):
        spec_of("MistralForCausalLM", layer_types=kinds)


# In the form of published files: no key of real checkpoints may be refused.
PUBLISHED: Mapping[str, Mapping[str, object]] = {
    "Llama 1, converted early": {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_sequence_length": 2048,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "Vicuna": {
        "_name_or_path": "vicuna-7b-v1.5-16k",
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "max_sequence_length": 16384,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "CodeLlama": {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 16384,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.0.dev0",
        "use_cache": True,
        "vocab_size": 32016,
    },
    "Llama 3.2, a fine-tune": {
        "_attn_implementation_autoset": True,
        "_name_or_path": "meta-llama/Llama-3.2-1B-Instruct",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pad_token_id": 128004,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.0.dev0",
        "unsloth_fixed": True,
        "unsloth_version": "2025.3.1",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "Llama 2, yarn": {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "finetuned": True,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "Mistral 0.1": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "Ministral": {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9,
        "max_position_embeddings": 32768,
        "model_type": "ministral",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.0.dev0",
        "use_cache": True,
        "vocab_size": 131072,
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_passes(name: str) -> None:
    config = PUBLISHED[name]
    spec = ModelSpec.from_config(config, file=FILE)
    assert spec.num_layers == config["num_hidden_layers"]
