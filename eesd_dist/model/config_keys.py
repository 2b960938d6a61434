"""Lists the keys of config.json that are supported, and their allowed values.

A key that changes what transformers computes and that is not read here would silently give wrong
logits. Every key is therefore in one list: it is read, it is known to be harmless, or it is refused
unless it has the value that changes nothing. The lists cover the configuration classes of
transformers; a test enumerates those of the installed version.

A key in no list that is null, false or empty passes: a feature is not used. One with text, or that
begins with an underscore, is passed over with a warning: it names or describes something, and
transformers does not read it either. One with a number, a switch or an object is refused: it may
change the logits. Zero is refused too: for a factor it is an ordinary value. `ignored` keys pass:
the operator says that they change nothing (`model.ignore_config_keys`). Reads no files.
"""

import json
import logging
import reprlib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from eesd_dist.errors import CheckpointError, ConfigError, listed
from eesd_dist.model.positions import LENGTH_KEYS

logger = logging.getLogger(__name__)

READ = frozenset(LENGTH_KEYS) | frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)
"""Keys of every family; `Family.keys` are those that only some have."""

_HARMLESS_GROUPS: Mapping[str, frozenset[str]] = {
    "defaults for `generate`; requests and generation_config.json decide here": frozenset(
        {
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "bad_words_ids",
            "begin_suppress_tokens",
            "cache_implementation",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "encoder_repetition_penalty",
            "epsilon_cutoff",
            "eta_cutoff",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "max_new_tokens",
            "min_length",
            "no_repeat_ngram_size",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "remove_invalid_values",
            "repetition_penalty",
            "suppress_tokens",
            "target_lookbehind",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "use_cache",
        }
    ),
    "training only": frozenset(
        {
            "attention_dropout",
            "attn_pdrop",
            "classifier_dropout",
            "embd_pdrop",
            "gradient_checkpointing",
            "hidden_dropout",
            "initializer_range",
            "resid_pdrop",
        }
    ),
    "which outputs transformers returns, and as what": frozenset(
        {
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "return_dict",
            "return_dict_in_generate",
            "tie_last_hidden_states",
            "torchscript",
        }
    ),
    "classification and other tasks": frozenset(
        {
            "finetuning_task",
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "task_specific_params",
        }
    ),
    "text, not arithmetic: the tokenizer's files decide": frozenset(
        {
            "decoder_start_token_id",
            "pad_token_id",
            "prefix",
            "sep_token_id",
            "tokenizer_class",
            "tokenizer_model_max_length",
            "tokenizer_padding_side",
            "unk_token_id",
        }
    ),
    # `pretraining_tp` cut products into slices in older versions: the same sums in another order.
    "read by no model of these families in transformers": frozenset(
        {"chunk_size_feed_forward", "is_decoder", "pretraining_tp", "tf_legacy_loss"}
    ),
    "which routine computes, not what": frozenset(
        {
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_attn_implementation_internal",
            "_experts_implementation",
            "_experts_implementation_internal",
            "_flash_attn_2_enabled",
            "attn_implementation",
            "experts_implementation",
            "use_bfloat16",
        }
    ),
    "where a checkpoint comes from": frozenset(
        {
            "_commit_hash",
            "_name_or_path",
            "is_llama_config",
            "model_name",
            "name_or_path",
            "transformers.js_config",
            "transformers_version",
            "unsloth_fixed",
            "unsloth_version",
        }
    ),
}

HARMLESS = frozenset().union(*_HARMLESS_GROUPS.values())

REFUSED: Mapping[str, object] = {
    "add_cross_attention": False,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "cross_attention_hidden_size": None,
    "dual_chunk_attention_config": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "is_encoder_decoder": False,
    "llama_4_scaling_beta": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "no_rope_layers": None,
    "per_layer_config": None,
    "pruned_heads": None,
    "residual_multiplier": 1,
    "scale_attn_weights": True,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": None,
    "use_rope": True,
}
"""Keys that change what is computed, and the value with which they do not; null is always allowed.
A family that lists one of them in `Family.keys` computes it."""

READ_ROPE = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
"""Keys of every rope type."""

_TRAINED_LENGTH = frozenset({"original_max_position_embeddings"})

READ_BY_ROPE_TYPE: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": _TRAINED_LENGTH | {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _TRAINED_LENGTH
    | {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": _TRAINED_LENGTH | {"attention_factor", "factor", "long_factor", "short_factor"},
}
"""A factor that the rope type does not have counts as an unknown key: transformers ignores it,
other libraries may not."""

HARMLESS_ROPE = _TRAINED_LENGTH | {"finetuned"}
"""Keys that describe the base model, for rope types that do not compute with them."""

REFUSED_ROPE: Mapping[str, object] = {
    "llama_4_scaling_beta": None,
    "mrope_section": None,
}


def refuse_unread_keys(
    config: Mapping[str, object],
    *,
    own: frozenset[str],
    published_code: str | None,
    what: str,
    file: Path,
    ignored: Collection[str] = (),
) -> None:
    """Raises CheckpointError for keys that may change the logits and that are not read.

    `own`: the keys of the family; `published_code`: the class in `auto_map` that transformers has
    adopted; `what`: the architecture's name. Raises ConfigError for an `ignored` key that is read.
    """
    if read := sorted((READ | own).intersection(ignored)):
        raise ConfigError(
            f"model.ignore_config_keys: found {listed(read)}, expected keys that {what} is "
            "computed without: leave out what is read"
        )
    code = config.get("auto_map")
    if isinstance(code, Mapping) and any(
        str(name).startswith("AutoModel") and str(where).rpartition("--")[2] != published_code
        for name, where in code.items()
    ):
        raise CheckpointError(
            file=file,
            found=f"auto_map = {reprlib.repr(dict(code))}",
            expected=f"{what} as implemented in transformers, not code that comes with the model",
            advice="remove the key from the file if the code does not change what is computed",
        )
    _refuse(
        config,
        read_keys=READ | own | HARMLESS,
        neutral_values=REFUSED,
        file=file,
        what=what,
        ignored=ignored,
    )


def refuse_unread_rope_keys(
    parameters: Mapping[str, object], *, kind: str, file: Path, ignored: Collection[str] = ()
) -> None:
    """Raises CheckpointError for such keys in `rope_parameters` or `rope_scaling`."""
    _refuse(
        parameters,
        read_keys=READ_ROPE | READ_BY_ROPE_TYPE[kind] | HARMLESS_ROPE,
        neutral_values=REFUSED_ROPE,
        file=file,
        what=f"rope type {kind}",
        ignored=ignored,
    )


_ADVICE = (
    "name the key in model.ignore_config_keys, or remove it from the file, if it does not change "
    "what the model computes"
)


def _refuse(
    config: Mapping[str, object],
    *,
    read_keys: frozenset[str],
    neutral_values: Mapping[str, object],
    file: Path,
    what: str,
    ignored: Collection[str],
) -> None:
    unknown, described = [], []
    for key, value in config.items():
        if key in read_keys or key in ignored or value is None:
            continue
        if key in neutral_values:
            if not _is_neutral(value, neutral_values[key]):
                raise CheckpointError(
                    file=file,
                    found=f"{key} = {reprlib.repr(value)}",
                    expected=f"{json.dumps(neutral_values[key])}: {what} is computed without it",
                    advice=_ADVICE,
                )
        elif key.startswith("_") or _is_text(value):
            described.append(f"{key} = {reprlib.repr(value)}")
        elif not _is_off(value):
            unknown.append(f"{key} = {reprlib.repr(value)}")
    if unknown:
        raise CheckpointError(
            file=file,
            found=listed(unknown),
            expected=f"keys that {what} is known to have (or null, false, empty)",
            advice=_ADVICE,
        )
    if described:
        _warn_of_described(file, listed(described))


@cache
def _warn_of_described(file: Path, keys: str) -> None:
    """Warns once in a process, which may read a file several times."""
    logger.warning("unknown keys are ignored: file=%s keys=%s", file, keys)


def _is_neutral(value: object, neutral: object) -> bool:
    return _is_off(value) if neutral is None or neutral is False else value == neutral


def _is_off(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _is_text(value: object) -> bool:
    """Returns True for text or a list of texts that says anything."""
    texts = value if isinstance(value, list) else [value]
    return bool(value) and all(isinstance(text, str) for text in texts)
