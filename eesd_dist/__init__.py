"""Early-exit speculative decoding, split over stages: the engine and all layers below it.

    from eesd_dist import LLM, SamplingParams

    llm = LLM("path/to/checkpoint")
    for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(completion.text)

Names are imported when they are first used: a process that only reads configurations loads no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eesd_dist.config import EngineConfig
    from eesd_dist.engine.llm import LLM, Completion
    from eesd_dist.types import SamplingParams, SpeculationParams

__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams", "SpeculationParams"]

_HOMES = {
    "LLM": "eesd_dist.engine.llm",
    "Completion": "eesd_dist.engine.llm",
    "EngineConfig": "eesd_dist.config",
    "SamplingParams": "eesd_dist.types",
    "SpeculationParams": "eesd_dist.types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
