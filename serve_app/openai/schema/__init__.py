"""Bodies of requests."""

from serve_app.openai.schema.generation import (
    REQUEST_ID_PATTERN,
    ChatFields,
    CompletionFields,
    ContentPart,
    GenerationFields,
    Message,
)
from serve_app.openai.schema.json_shape import check_json
from serve_app.openai.schema.responses import ResponsesFields
from serve_app.openai.schema.structured_output import (
    AskedGrammar,
    asked_grammar,
    has_grammar,
    naming,
)
from serve_app.openai.schema.tokens import DetokenizeFields, TokenizeFields
from serve_app.openai.schema.tools import NamedTool
from serve_app.openai.schema.unsupported import ignored, unsupported

__all__ = [
    "REQUEST_ID_PATTERN",
    "AskedGrammar",
    "ChatFields",
    "CompletionFields",
    "ContentPart",
    "DetokenizeFields",
    "GenerationFields",
    "Message",
    "NamedTool",
    "ResponsesFields",
    "TokenizeFields",
    "asked_grammar",
    "check_json",
    "has_grammar",
    "ignored",
    "naming",
    "unsupported",
]
