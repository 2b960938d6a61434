"""Early-exit speculative decoding, split over stages: the engine and all layers below it.

    from eesd_dist import LLM, SamplingParams

    llm = LLM("path/to/checkpoint")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

Names are imported when they are first used: a process that only reads configurations loads no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eesd_dist.config import EngineConfig
    from eesd_dist.llm.llm import LLM
    from eesd_dist.llm.outputs import CompletionOutput, RequestOutput
    from eesd_dist.llm.sampling_params import SamplingParams
    from eesd_dist.parameters import StructuredOutputs as StructuredOutputsParams
    from eesd_dist.types import SpeculationParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculationParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "eesd_dist.llm.llm:LLM",
    "CompletionOutput": "eesd_dist.llm.outputs:CompletionOutput",
    "EngineConfig": "eesd_dist.config:EngineConfig",
    "RequestOutput": "eesd_dist.llm.outputs:RequestOutput",
    "SamplingParams": "eesd_dist.llm.sampling_params:SamplingParams",
    "SpeculationParams": "eesd_dist.types:SpeculationParams",
    "StructuredOutputsParams": "eesd_dist.parameters:StructuredOutputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
