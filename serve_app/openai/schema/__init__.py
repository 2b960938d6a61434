"""Bodies of requests."""

from serve_app.openai.schema.generation import (
    REQUEST_ID_PATTERN,
    ChatFields,
    CompletionFields,
    GenerationFields,
)
from serve_app.openai.schema.responses import ResponsesFields
from serve_app.openai.schema.tokens import DetokenizeFields, TokenizeFields
from serve_app.openai.schema.tools import NamedTool
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
