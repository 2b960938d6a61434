"""Requests that are prepared for an engine: what is generated, and what the answer shows of it."""

from dataclasses import dataclass
from typing import Self

from eesd_dist.types import Request, TokenId
from serve_app.openai.context import RequestContext
from serve_app.openai.event_ids import EventIds, Shown
from serve_app.openai.schema import GenerationFields
from serve_app.openai.tools import ToolUse
from serve_app.openai.workloads import Kind

Prompt = tuple[TokenId, ...]

_UNSTATED_TOKENS = 1024
"""Reserved for an answer of which the request states no length: the rest of a long context, which
few answers need, would keep the other requests of a key waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A text to be generated."""

    index: int
    prompt_index: int
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options that turn tokens into the text of an answer."""

    stops: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: frozenset[TokenId] = frozenset()
    """Special tokens that are not skipped: the marks of tool calls."""
    drops_tokens: bool = False
    """True if what is generated is not part of the answer, which is about the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Form of an answer, and what it has besides texts."""

    stream: bool
    include_usage: bool
    detailed_statistics: bool
    prompt_logprobs: int | None
    """Alternatives of each token of the prompts, where these are reported by themselves."""
    return_token_ids: bool
    return_token_origins: bool

    @classmethod
    def of(cls, fields: GenerationFields) -> Self:
        return cls(
            stream=fields.stream,
            include_usage=fields.stream_options.include_usage,
            detailed_statistics=fields.speculation.detailed,
            prompt_logprobs=fields.prompt_logprobs,
            return_token_ids=fields.return_token_ids,
            return_token_origins=fields.return_token_origins,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A client's request: one or more choices for each of one or more prompts."""

    kind: Kind
    request_id: str
    """Id from the body, else from the header X-Request-Id, else drawn."""
    model: str
    created_unix_s: int
    arrived_s: float
    """Time of arrival on the monotonic clock."""
    seed: int
    prompts: tuple[Prompt, ...]
    echoed: tuple[str, ...]
    """Text before the answers of each prompt; empty strings without `echo`."""
    choices: tuple[Choice, ...]
    num_extras: int
    """Most log-probabilities and repeated prompt tokens that the answer may have."""
    text: TextOptions
    tool_use: ToolUse | None
    """None where no tool may be called."""
    max_draft_tokens: int | None
    """Ceiling on one draft; None when the request switched speculation off."""
    options: AnswerOptions
    warnings: tuple[str, ...]
    """Warnings in the answer to its client."""
    shown: tuple[Shown, ...]
    """The part of each choice that the client has; nothing, unless it resumes a stream."""
    context: RequestContext
    states_length: bool
    """True if the request says how many tokens an answer has at most."""
    event_ids: EventIds | None
    """None where the client has not asked for them."""

    @property
    def response_id(self) -> str:
        return response_id_of(self.kind, self.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_expected_tokens(self) -> int:
        """Tokens of prompts and answers that are reserved before anything is computed."""
        texts = [choice.request.sampling for choice in self.choices]
        longest = [sampling.max_tokens for sampling in texts]
        if not self.states_length:
            longest = [min(s.max_tokens, max(s.min_tokens, _UNSTATED_TOKENS)) for s in texts]
        return self.num_prompt_tokens + sum(longest)

    @property
    def is_resumed(self) -> bool:
        return self.choices[0].request.resumption > 0

    def has_to_run(self, choice: Choice) -> bool:
        """A choice that was shown to its end runs again only to be counted."""
        return self.options.include_usage or not self.shown[choice.index].is_over


def response_id_of(kind: Kind, name: str) -> str:
    prefix = "chatcmpl" if kind == "chat" else "cmpl"
    return f"{prefix}-{name}"
