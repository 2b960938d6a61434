"""Bodies of requests."""

from serve_app.openai.schema.bodies import (
    REQUEST_ID_PATTERN,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    GenerationFields,
    NamedTool,
    TokenizeFields,
)
from serve_app.openai.schema.responses import ResponsesFields
from serve_app.openai.schema.unsupported import ignored, unsupported

__all__ = [
    "REQUEST_ID_PATTERN",
    "ChatFields",
    "CompletionFields",
    "DetokenizeFields",
    "GenerationFields",
    "NamedTool",
    "ResponsesFields",
    "TokenizeFields",
    "ignored",
    "unsupported",
]
