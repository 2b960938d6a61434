"""Batches of requests: `eesd batch`, and processors with the names of `ray.data.llm`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.batch.processor import (
        EESDEngineProcessorConfig,
        EESDServiceProcessorConfig,
        build_processor,
    )

__all__ = ["EESDEngineProcessorConfig", "EESDServiceProcessorConfig", "build_processor"]


def __getattr__(name: str) -> Any:
    """Imports a processor's name when it is used: Ray reads the environment when it is imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from serve_app.batch import processor

    return getattr(processor, name)
