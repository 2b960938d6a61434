"""Resolves `dtype: auto`, the type in which a checkpoint's weights are loaded.

`auto` takes the type in config.json (`dtype`, or the older `torch_dtype`), as transformers does.
If there is none, or one that is not supported, it takes the type of the stored embedding. Reads
headers and no weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from eesd_dist.config import DType, DTypeSetting
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.span import EMBEDDING, LM_HEAD
from eesd_dist.model.weights import Checkpoint

_STORED: Mapping[str, DType] = {
    "F64": "float32",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}


def resolve_dtype(setting: DTypeSetting, folder: Path) -> DType:
    """Returns the setting, or for `auto` the checkpoint's type.

    Raises CheckpointError when neither config.json nor the embedding has a supported type.
    """
    if setting != "auto":
        return setting
    config = read_json(folder / "config.json")
    config_dtype = config.get("dtype") or config.get("torch_dtype")
    for dtype in get_args(DType):
        if config_dtype in (dtype, f"torch.{dtype}"):
            supported: DType = dtype
            return supported
    with Checkpoint(folder) as checkpoint:
        # A tied embedding may be stored as the LM head.
        name = EMBEDDING if EMBEDDING in checkpoint else LM_HEAD
        return _STORED[checkpoint.stored_type(name)]
