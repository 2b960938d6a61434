"""Which type a checkpoint's weights are loaded in when the configuration leaves it open.

`auto` takes what config.json says (`dtype`, or the older `torch_dtype`), as transformers does.
Where it says nothing, or a type that is not computed with here, the type of the stored embedding
decides. Reads headers and no weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from eesd_dist.config import DType, DTypeSetting
from eesd_dist.model.span import EMBEDDING
from eesd_dist.model.spec import read_json
from eesd_dist.model.weights import Checkpoint

_STORED: Mapping[str, DType] = {
    "F64": "float32",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}


def resolve_dtype(setting: DTypeSetting, folder: Path) -> DType:
    """Raises CheckpointError for `auto` when neither config.json nor the embedding has a type."""
    if setting != "auto":
        return setting
    config = read_json(folder / "config.json")
    said = config.get("dtype") or config.get("torch_dtype")
    for dtype in get_args(DType):
        if said in (dtype, f"torch.{dtype}"):
            known: DType = dtype
            return known
    with Checkpoint(folder) as checkpoint:
        return _STORED[checkpoint.stored_type(EMBEDDING)]
