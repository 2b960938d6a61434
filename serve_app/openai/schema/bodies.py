"""Bodies of requests: OpenAI's names, the extras of vLLM, and `speculation`.

Types and ranges of single fields are checked here, strictly: "0.5" is no number. A null means the
default, as OpenAI's clients send it. Undeclared fields are kept aside (`unsupported`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)
from pydantic_core import core_schema

from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.parameters import Fields, Messages, NumAlternatives, SamplingFields
from eesd_dist.types import SpeculationParams, TreeShape
from serve_app.openai.keys import MAX_PRIORITY
from serve_app.openai.workloads import WORKLOAD_PATTERN, Kind

REQUEST_ID_PATTERN = r"^[\x21-\x7e]{1,128}$"
"""ASCII without blanks and control characters: ids are written to logs."""
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_MAX_TOOLS = 128


class Function(Fields):
    """`tools[].function`."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    """A JSON schema of the arguments."""


class Tool(Fields):
    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """`{"type": "function", "function": {"name": ...}}`."""

    type: Literal["function"]
    function: FunctionName


class ToolFields(BaseModel):
    """The fields of a chat that say which tools may, or must, be called."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)] = []
    """Functions that the answer may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """`none`: no calls; `auto`: the model decides; `required`, or one tool: the answer is made of
    calls with arguments that match their schemas."""
    parallel_tool_calls: bool = True
    """Allows several calls in the answer."""

    @property
    def usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """True if the answer is made of calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
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
    """`off`: plain decoding."""
    controller: ControllerName | None = None
    """Decides how far to draft; the service's default when absent."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    """Ceiling on one draft; the service's ceiling still holds."""
    workload: Annotated[str, Field(pattern=WORKLOAD_PATTERN)] | None = None
    """Class of similar requests, which share a pooled prior; derived when absent."""
    tree: TreeShape | None = None
    """Drafting of alternatives: `none`, `static` or `dynamic`; the service's default when
    absent."""
    detailed: bool = False
    """Lists every round in the statistics."""

    @property
    def params(self) -> SpeculationParams:
        """The engine's own limits apply as well."""
        return SpeculationParams(
            mode=self.mode,
            controller=self.controller,
            max_draft_tokens=self.max_draft_tokens,
            tree=self.tree,
        )


class StreamOptions(Fields):
    include_usage: bool = False
    """Adds a chunk with usage and metrics before the end."""
    flush_interval_s: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Shortest time between two chunks, but for the first and the last one; 0: a chunk for each
    round. The service's default when absent."""


class GenerationFields(SamplingFields):
    """Fields of both kinds of requests."""

    kind: ClassVar[Kind]
    model: str | None = None
    """Name of the served model; may be left out."""
    return_token_ids: bool = False
    """Adds the ids of the answer's tokens, and those of the prompt, to the answer."""
    return_token_origins: bool = False
    """Adds the origin of each token (`accepted`, `recovered`, `bonus` or `target`) with its text,
    and the drafted and accepted tokens of each draft."""
    stream: bool = False
    """Sends the answer as server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    """Options of streams: `include_usage` adds usage and metrics, `flush_interval_s` is the
    shortest time between two chunks but for the first and the last one."""
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    """Becomes part of the response's id."""
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = 0
    """Added to that of the API key: requests of a lower number come first, and take the place of
    running ones of a higher number."""
    speculation: SpeculationFields = SpeculationFields()
    """Settings of drafting; they never change the text."""
    cache_salt: CacheSalt | None = None
    """A secret: of the API key's requests, only those with the same one reuse each other's prefixes
    in the KV cache."""

    @property
    def states_length(self) -> bool:
        """True if it says how many tokens the answer has at most, or a default does."""
        return self.max_tokens is not None

    @property
    def unknown(self) -> Mapping[str, object]:
        """Fields that are not declared."""
        return self.model_extra or {}


class CompletionFields(GenerationFields):
    """Body of `POST /v1/completions`."""

    kind = "completion"
    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    )
    """A text, several, or the same as token ids."""
    max_tokens: NonNegativeInt | None = None
    """0 generates nothing, for the log-probabilities of the prompt."""
    echo: bool = False
    """Begins the answer with the prompt."""
    logprobs: NumAlternatives | None = None
    """Number of alternatives reported for every token; with `echo` also those of the prompt."""
    add_special_tokens: bool = True
    """Puts the tokenizer's beginning token before a text."""

    @property
    def states_length(self) -> bool:
        return True

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("Sequence[str | Sequence[int]]", self.prompt)


class ChatFields(GenerationFields, ToolFields):
    """Body of `POST /v1/chat/completions`."""

    kind = "chat"
    messages: Messages
    """The conversation, by the model's chat template."""
    max_completion_tokens: PositiveInt | None = None
    """The newer name of `max_tokens`; overrides it."""
    logprobs: bool = False
    """Reports the log-probability of every token."""
    top_logprobs: NumAlternatives | None = None
    """Needs `logprobs`."""
    add_generation_prompt: bool = True
    """Lets the template open an answer."""
    continue_final_message: bool = False
    """Continues the last message; needs `add_generation_prompt: false`."""
    chat_template_kwargs: dict[str, object] = {}
    """Options of the chat template."""

    @property
    def states_length(self) -> bool:
        return (self.max_completion_tokens or self.max_tokens) is not None


class TokenizeFields(Fields):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    """Name of the served model; may be left out."""
    prompt: str | None = None
    """A text."""
    messages: Messages | None = None
    """A conversation, by the model's chat template."""
    add_special_tokens: bool = True
    """Puts the tokenizer's beginning token before a text."""
    add_generation_prompt: bool = True
    """Lets the template open an answer."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeFields(Fields):
    """Body of `POST /detokenize`."""

    model: str | None = None
    """Name of the served model; may be left out."""
    tokens: Annotated[list[NonNegativeInt], Field(fail_fast=True)]
    """Token ids."""
