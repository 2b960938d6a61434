"""Turns the messages of a chat into what chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import from_json

from eesd_dist.errors import RequestError
from eesd_dist.parameters.fields import Fields, check_json
from eesd_dist.parameters.structured_output import naming

MAX_MESSAGES = 4096
"""Messages of a conversation, and parts of a message."""
_MAX_DEPTH = 64
"""Maximum depth of the arguments of a call."""
_NAMED_CHARS = 32
"""Maximum length of a client's word in an error, in characters."""


class ContentPart(Fields):
    type: str
    text: str = ""


class Message(Fields):
    """A message; undeclared fields go to the chat template unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] = ""


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def conversation_of(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Converts messages for chat templates: text contents, and `developer` becomes `system`."""
    return [
        {
            **_extra(message, index=i),
            "role": "system" if message.role == "developer" else message.role,
            "content": _content(message, index=i),
        }
        for i, message in enumerate(messages)
    ]


def _extra(message: Message, *, index: int) -> dict[str, object]:
    """Returns a message's other fields. Templates take the arguments of tool calls as objects; in
    the API they are JSON texts."""
    extra = dict(message.model_extra or {})
    if extra.get("tool_calls") == []:
        del extra["tool_calls"]  # templates ask whether it is there
    if "tool_calls" in extra:
        with naming(f"messages[{index}].tool_calls"):
            extra["tool_calls"] = _calls_of(extra["tool_calls"])
    return extra


def _calls_of(calls: object) -> list[object]:
    if not isinstance(calls, list):
        raise RequestError("found no list, expected the calls of an answer")
    read: list[object] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError("found a call without a function's name, expected function.name")
        arguments = _arguments_of(function.get("arguments"))
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _arguments_of(arguments: object) -> dict[str, object]:
    """Returns the arguments of a call as an object, which every template can write: empty if there
    are none, with what was complete of a text cut off at its `max_tokens`, and with a value of
    another type as `value`. Raises RequestError for a text that is no JSON."""
    if isinstance(arguments, str):
        arguments = _json_of(arguments)
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"value": arguments}


def _json_of(text: str) -> object:
    if not text.strip():
        return None
    try:
        check_json(text.encode(), max_depth=_MAX_DEPTH)
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return from_json(text, allow_partial="trailing-strings")
    except (ValueError, RecursionError) as error:  # half surrogates too
        raise RequestError(f"found arguments that are no JSON: {error}") from error


def _content(message: Message, *, index: int) -> str:
    if isinstance(message.content, str):
        return message.content
    for segment in message.content:
        if segment.type != "text":
            raise RequestError(
                f"content parts of type '{segment.type[:_NAMED_CHARS]}' are not supported: this "
                "model reads text",
                param=f"messages[{index}].content",
            )
    return "\n".join(segment.text for segment in message.content)
