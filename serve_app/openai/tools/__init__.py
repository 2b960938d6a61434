"""Tool calls: how a model is told of tools, made to call them, and read."""

from serve_app.openai.tools.formats import ToolFormat, calls_grammar, format_of
from serve_app.openai.tools.parser import CallDelta, ToolCallParser
from serve_app.openai.tools.use import ToolUse, tool_use_of

__all__ = [
    "CallDelta",
    "ToolCallParser",
    "ToolFormat",
    "ToolUse",
    "calls_grammar",
    "format_of",
    "tool_use_of",
]
