"""Layout of a pipeline, from its configuration and the config files of the checkpoints.

Reads no weights.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from eesd_dist.config import DType, EngineConfig, KvCacheDType
from eesd_dist.control.registry import entry_of
from eesd_dist.errors import ConfigError
from eesd_dist.model.dtype import resolve_dtype
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.heads.head_files import head_folder
from eesd_dist.model.max_len import within
from eesd_dist.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a pipeline as its configuration and the checkpoints' config files give it."""

    spec: ModelSpec
    head_folder: Path | None
    split: int
    """The draft stage runs layers [0, split)."""
    max_model_len: int
    """Maximum length in tokens, before pages that are sized from memory limit it."""
    dtype: DType
    """Type of the target's and the exit head's weights."""
    kv_cache_dtype: KvCacheDType
    device: torch.device


def layout_of(config: EngineConfig) -> Layout:
    """Reads the target's and the head's config files, and no weights.

    Raises CheckpointError when they do not fit each other, ConfigError when the configured lengths
    do not fit the model or the configured controller does not exist.
    """
    entry_of(config.speculation.controller)
    model = config.model
    spec = ModelSpec.from_folder(model.path, ignored_keys=model.ignore_config_keys)
    folder = head_folder(model.path, model.head)
    split = _split_of(spec, model.path, folder)
    return Layout(
        spec=spec,
        head_folder=folder,
        split=split,
        max_model_len=within(config, spec.max_position_embeddings),
        dtype=resolve_dtype(model.dtype, model.path),
        kv_cache_dtype=config.cache.kv_cache_dtype,
        device=device_named(model.device),
    )


def _split_of(spec: ModelSpec, path: Path, head_folder: Path | None) -> int:
    """Returns the head's exit layer; without a head (no drafts) an eighth of the layers."""
    if head_folder is None:
        return max(1, spec.num_layers // 8)
    return HeadConfig.read(head_folder, target=spec, target_path=path).exit_layer


def device_named(name: str, *, setting: str = "model.device") -> torch.device:
    """Returns the device for `name`, the value of a setting, in this process. A GPU has an index:
    NCCL and `torch.cuda.set_device` require one. CUDA_VISIBLE_DEVICES determines which GPU has
    index 0."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"{setting} is {name} and torch sees no CUDA device: use auto or cpu")
    # `current_device` would initialise CUDA, also in processes that only read the layout; before
    # initialisation the current device is the first one.
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device() if is_initialized else 0)
