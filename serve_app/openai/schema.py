"""Fields of requests: OpenAI's names, the extras of vLLM, and `speculation`.

Types and ranges of single fields are checked here, strictly: "0.5" is no number. A null means the
default, as OpenAI's clients send it. Undeclared fields are kept aside; `unsupported` says which of
them are refused because ignoring them would change the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, Self, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)
from pydantic_core import core_schema

from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.types import TreeShape
from serve_app.openai.fields import MAX_ENTRIES, Fields, check_number
from serve_app.openai.structured_output import StructuredFields
from serve_app.openai.workloads import WORKLOAD_PATTERN

_MAX_STOPS = 16
_MAX_MESSAGES = 4096
"""Messages of a conversation, and parts of a message."""
REQUEST_ID_PATTERN = r"^[\x21-\x7e]{1,128}$"
"""ASCII without blanks and control characters: ids are written to logs."""

Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""64 bits, read with or without a sign: -1 and 2**64 - 1 are one seed."""
NumAlternatives = Annotated[int, Field(ge=0, le=20)]
Tokens = Annotated[list[NonNegativeInt], Field(min_length=1, fail_fast=True)]
"""The first wrong id ends the check: describing a million of them takes seconds."""


class _OneOf:
    """Accepts only these strings, with the errors and the JSON schema of a `Literal`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.literal_schema(self._names)


ControllerName = Annotated[str, _OneOf(CONTROLLER_NAMES)]


class SpeculationFields(Fields):
    """Speculation settings of a request; they change its time, never its text."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["off", "auto"] = "auto"
    controller: ControllerName | None = None
    """Decides how far to draft; the service's default when absent."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    """Ceiling on one draft; the service's ceiling still holds."""
    workload: Annotated[str, Field(pattern=WORKLOAD_PATTERN)] | None = None
    """Class of similar requests, which share a pooled prior; derived when absent."""
    tree: TreeShape | None = None
    """Whether alternatives are drafted too: `none`, `static` or `dynamic`; the service's default
    when absent."""
    detailed: bool = False
    """Whether the statistics list every round."""


class StreamOptions(Fields):
    include_usage: bool = False
    """Adds a chunk with usage and metrics before the end."""


class GenerationFields(Fields, StructuredFields):
    """Fields of both kinds of requests."""

    model: str | None = None
    """Name of the served model; may be left out."""
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(check_number)] = {}
    """Token id to the value that is added to its logit."""
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0 and -1 keep the whole vocabulary."""
    min_p: Probability = 0.0
    seed: Seed | None = None
    """Drawn at random when absent; `metrics.seed` of the response reports it."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] = []
    stop_token_ids: Annotated[
        list[NonNegativeInt], Field(max_length=MAX_ENTRIES, fail_fast=True)
    ] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: PositiveInt | None = None
    min_tokens: NonNegativeInt = 0
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    """Becomes part of the response's id."""
    speculation: SpeculationFields = SpeculationFields()

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def unknown(self) -> Mapping[str, object]:
        """Fields that are not declared."""
        return self.model_extra or {}


class CompletionFields(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    )
    echo: bool = False
    """Whether the answer begins with the prompt."""
    logprobs: NumAlternatives | None = None
    """Number of alternatives reported for every token."""
    add_special_tokens: bool = True

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """One entry per prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("Sequence[str | Sequence[int]]", self.prompt)


class ContentPart(Fields):
    type: str
    text: str = ""


class Message(Fields):
    """One message; undeclared fields go to the chat template unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=_MAX_MESSAGES, fail_fast=True)] = (
        ""
    )


Messages = Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]


class ChatFields(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: PositiveInt | None = None
    """The newer name of `max_tokens`; overrides it."""
    logprobs: bool = False
    top_logprobs: NumAlternatives | None = None
    """Needs `logprobs`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}


class TokenizeFields(Fields):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeFields(Fields):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[NonNegativeInt], Field(fail_fast=True)]


def _never(_: object) -> bool:
    return False


def _empty(value: object) -> bool:
    return not value


def _only_text(value: object) -> bool:
    return value == ["text"]


def _none(value: object) -> bool:
    return value == "none"


_HARMLESS_WHEN: Mapping[str, Callable[[object], bool]] = {
    "allowed_token_ids": _never,
    "audio": _never,
    "bad_words": _empty,
    "cache_salt": _never,
    "chat_template": _never,
    "documents": _empty,
    "function_call": _none,
    "functions": _empty,
    "length_penalty": lambda value: value == 1.0,
    "logits_processors": _empty,
    "modalities": _only_text,
    "prompt_logprobs": _never,
    "suffix": _empty,
    "thinking_token_budget": _never,
    "truncate_prompt_tokens": _never,
    "use_beam_search": _empty,
    "vllm_xargs": _empty,
    "web_search_options": _never,
}
"""Undeclared fields that are refused, except for values that change nothing."""

_QUIETLY_IGNORED = frozenset(
    {
        "best_of",
        "guided_decoding_backend",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "tool_choice",
        "tools",
        "user",
        *_HARMLESS_WHEN,
    }
)


def unsupported(fields: GenerationFields) -> str | None:
    """Returns the first field that would change the answer and is not supported; None: none."""
    unknown = fields.unknown
    for name, value in unknown.items():
        harmless = _HARMLESS_WHEN.get(name)
        if harmless is not None and not harmless(value):
            return name
    if unknown.get("tools") and unknown.get("tool_choice") != "none":
        return "tools"
    if unknown.get("tool_choice", "none") not in ("none", "auto"):
        return "tool_choice"
    if unknown.get("best_of", fields.n) not in (1, fields.n):
        return "best_of"
    if isinstance(fields, CompletionFields) and fields.echo and fields.logprobs is not None:
        return "echo"
    return None


def ignored(fields: GenerationFields) -> list[str]:
    """Returns undeclared fields that are worth a line in the log."""
    return sorted(fields.unknown.keys() - _QUIETLY_IGNORED)
