"""Body of `POST /v1/responses`: texts in OpenAI's newer form, without anything that is stored."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from eesd_dist.errors import RequestError
from eesd_dist.parameters import MAX_MESSAGES, Fields, JsonObject, Seed, Temperature
from serve_app.openai.schema.bodies import (
    REQUEST_ID_PATTERN,
    CacheSalt,
    ChatFields,
    SpeculationFields,
)

_ROLES = Literal["system", "developer", "user", "assistant"]


class InputPart(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Fields):
    type: Literal["message"] = "message"
    role: _ROLES
    content: str | Annotated[list[InputPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class TextFormat(Fields):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema_: JsonObject | None = Field(default=None, alias="schema")


class TextFields(Fields):
    format: TextFormat = TextFormat()


class ResponsesFields(Fields):
    """A conversation, and how to answer it. Nothing is stored, whatever `store` says."""

    model: str | None = None
    """The served model's name."""
    input: (
        str
        | Annotated[
            list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
        ]
    )
    """A text of the user, or messages."""
    instructions: str | None = None
    """A system message that precedes them."""
    max_output_tokens: PositiveInt | None = None
    """Most tokens of the answer; what the context has room for by default."""
    temperature: Temperature = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keeps the likeliest tokens that together have this probability."""
    seed: Seed | None = None
    """Drawn at random when absent."""
    text: TextFields = TextFields()
    """`format`: what the answer has to look like, as `response_format` of a chat."""
    stream: bool = False
    """Sends the answer as named server-sent events."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Repeated in the answer."""
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    """Becomes part of the answer's id."""
    speculation: SpeculationFields = SpeculationFields()
    """Settings of drafting; they never change the text."""
    cache_salt: CacheSalt | None = None
    """A secret: of the API key's requests, only those with the same one reuse each other's prefixes
    in the KV cache."""

    def as_chat(self) -> ChatFields:
        """Returns the same request as a chat. Raises RequestError for what is not supported."""
        self._refuse()
        messages: list[JsonObject] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_message(message) for message in self.input]
        stated = self.model_fields_set
        others = (self.model_extra or {}).keys() - ChatFields.model_fields.keys() - _REFUSED.keys()
        return ChatFields.model_validate(
            {
                **{name: (self.model_extra or {})[name] for name in others},
                "model": self.model,
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature if "temperature" in stated else None,
                "top_p": self.top_p if "top_p" in stated else None,
                "seed": self.seed,
                "response_format": _response_format(self.text.format),
                "stream": self.stream,
                "stream_options": {"include_usage": self.stream},
                "request_id": self.request_id,
                "speculation": self.speculation.model_dump(),
                "cache_salt": self.cache_salt,
            }
        )

    def _refuse(self) -> None:
        unknown = self.model_extra or {}
        for name, harmless in _REFUSED.items():
            if unknown.get(name) and unknown[name] not in harmless:
                raise RequestError(
                    f"{name}: not supported here; leave the field out, or use /v1/chat/completions",
                    param=name,
                )


_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (),
    "conversation": (),
    "include": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (),
    "truncation": ("disabled",),
}
"""Fields that would change the answer -> values that do not."""


def _message(message: InputMessage) -> JsonObject:
    content = message.content
    text = content if isinstance(content, str) else "\n".join(segment.text for segment in content)
    return {"role": message.role, "content": text}


def _response_format(form: TextFormat) -> JsonObject | None:
    if form.type != "json_schema":
        return {"type": form.type}
    inner: JsonObject = {"name": form.name}
    if form.schema_ is not None:
        inner["schema"] = form.schema_
    return {"type": "json_schema", "json_schema": inner}
