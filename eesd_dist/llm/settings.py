"""The configuration of an engine from the keyword arguments of `LLM`."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from eesd_dist.config import EngineConfig, complaint_of
from eesd_dist.errors import ConfigError

_SECTIONS = ("model", "cache", "scheduler", "speculation", "grammars", "parallel")
_AS_IN_VLLM = {
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "token_budget",
    "enable_prefix_caching": "prefix_caching",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
}
"""vLLM's names of settings that have another one here."""
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "quantization": (None,),
    "speculative_config": (None,),
    "trust_remote_code": (True, False),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors"),
    "enforce_eager": (True, False),
    "enable_chunked_prefill": (True, None),
    "disable_log_stats": (True, False),
    "enable_lora": (False,),
}
"""Arguments of vLLM's `LLM` that are no settings here, and the values that change nothing."""
_ADVICE = {
    "tensor_parallel_size": "one process holds one rank: `eesd serve --verify-tp` shards a model",
    "pipeline_parallel_size": "`eesd serve` puts the two stages on devices of their own",
    "data_parallel_size": "`eesd serve --pipelines` starts several engines",
    "quantization": "weights are float32, bfloat16 or float16: set dtype",
    "speculative_config": "this engine drafts with the model's own first layers: set head, "
    "controller or max_draft_tokens",
    "tokenizer": "the tokenizer is read from the model's folder",
    "enable_lora": "merge the adapter into the weights",
}


def engine_config(model: str | Path | EngineConfig, settings: Mapping[str, object]) -> EngineConfig:
    """Returns a configuration in which each setting is at its key. Raises ConfigError for a
    setting that is unknown, or that asks for what one process does not do."""
    if isinstance(model, EngineConfig):
        tree: dict[str, Any] = model.model_dump(exclude_unset=True)
    else:
        tree = {"model": {"path": Path(model)}}
    for name, value in settings.items():
        if name in _HARMLESS:
            _check_harmless(name, value)
            continue
        key = _AS_IN_VLLM.get(name, name)
        tree.setdefault(_section_of(key), {})[key] = value
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(complaint_of(error, EngineConfig)) from error


def _check_harmless(name: str, value: object) -> None:
    if any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS[name]):
        return
    expected = " or ".join(map(repr, _HARMLESS[name]))
    advice = _ADVICE.get(name, "leave it out")
    raise ConfigError(f"{name}: found {value!r}, expected {expected}: {advice}")


def _section_of(key: str) -> str:
    for section in _SECTIONS:
        if key in _fields_of(section) and (section, key) not in (
            ("model", "path"),
            ("speculation", "seed"),
        ):
            return section
    raise ConfigError(_unknown(key))


def _fields_of(section: str) -> Mapping[str, Any]:
    kind = EngineConfig.model_fields[section].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, BaseModel)
    return kind.model_fields


def _unknown(name: str) -> str:
    names = [key for section in _SECTIONS for key in _fields_of(section)]
    close = get_close_matches(name, names, n=1)
    advice = f"did you mean {close[0]}?" if close else "docs/configuration.md lists the settings"
    return f"{name}: found an argument that is no setting of the engine; {advice}"
