"""The model as transformers runs it, in the type in which it decodes fastest on this machine."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eesd_dist.config import DType
from eesd_dist.devices import HOST

_TYPES: tuple[DType, ...] = ("float32", "bfloat16")
_PROMPT_TOKENS = 64
_NEW_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel:
    """A loaded model of transformers, and why it has this type."""

    model: Any
    dtype: DType
    tokens_per_s: Mapping[DType, float]
    """Speed of a short text by type, in tokens per second, prompt included."""

    def as_json(self) -> dict[str, object]:
        speeds = {dtype: round(speed, 1) for dtype, speed in self.tokens_per_s.items()}
        return {"dtype": self.dtype, "tokens_per_s_by_dtype": speeds}


def fastest_transformers_model(
    path: Path, *, device: torch.device, ours: DType
) -> TransformersModel:
    """Loads a checkpoint with transformers in `ours`, this engine's type, on a CPU also in float32
    and bfloat16, and returns the one that generated a short greedy text fastest, of two runs each.

    A comparison with a slower type than transformers offers would say little about this engine.
    """
    models: dict[DType, Any] = {}
    speeds: dict[DType, float] = {}
    types = (*_TYPES, ours) if device == HOST else (ours,)
    for dtype in dict.fromkeys(types):
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True
        )
        models[dtype] = model.to(device).eval()
        speeds[dtype] = max(_tokens_per_s(models[dtype], device) for _ in range(2))
        slower = min(models, key=lambda dtype: speeds[dtype])
        if len(models) > 1:
            del models[slower]
    (dtype,) = models
    return TransformersModel(model=models[dtype], dtype=dtype, tokens_per_s=speeds)


def _tokens_per_s(model: Any, device: torch.device) -> float:
    ids = torch.ones(1, _PROMPT_TOKENS, dtype=torch.long, device=device)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_NEW_TOKENS,
            min_new_tokens=_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        ).cpu()
    return _NEW_TOKENS / (time.perf_counter() - started)
