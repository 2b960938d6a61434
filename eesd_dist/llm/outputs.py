"""Results of `LLM`: texts, and how they came about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eesd_dist.errors import RequestError
from eesd_dist.text import TextCodec, TextFinish
from eesd_dist.types import TokenId, TokenLogprobs


class Logprob(NamedTuple):
    """Log-probability of a token under the target, before temperature and filters."""

    logprob: float
    rank: int | None
    """1 for the likeliest token; None for one that is not among the alternatives."""
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Speculation statistics of one text."""

    num_rounds: int
    num_drafted: int
    num_accepted: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens per drafted token; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """A generated text."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    cumulative_logprob: float | None
    """Sum over the tokens; None unless `SamplingParams.logprobs` is set."""
    logprobs: list[dict[int, Logprob]] | None
    """Per token, its own and its alternatives' by token id."""
    finish_reason: TextFinish
    stop_reason: str | int | None
    """The stop string or stop token that ended the text; None for an end-of-sequence token."""
    statistics: Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one prompt, in seconds since the call began."""

    first_token_s: float
    """Time when the first text's first token was there."""
    finished_s: float
    num_cached_prompt_tokens: int
    """Tokens of the prompt that were found in the KV cache."""


class RequestOutput:
    """A prompt and the texts that continue it, or the error that kept it from being continued."""

    __slots__ = (
        "_outputs",
        "error",
        "metrics",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "seed",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[TokenId],
        outputs: Sequence[CompletionOutput] = (),
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None,
        seed: int | None = None,
        metrics: RequestMetrics | None = None,
        error: RequestError | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        """None where token ids were given."""
        self.prompt_token_ids = list(prompt_token_ids)
        self.prompt_logprobs = prompt_logprobs
        """Log-probabilities of the prompt's tokens, as `CompletionOutput.logprobs`; None for the
        first token."""
        self.seed = seed
        """The seed of the texts, also where it was drawn: with it they are the same again."""
        self.metrics = metrics
        self.error = error
        """Error of the prompt; None where it was continued."""
        self._outputs = list(outputs)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The texts, `SamplingParams.n` of them. Raises the error of a prompt that has none."""
        if self.error is not None:
            raise self.error
        return self._outputs

    @property
    def finished(self) -> bool:
        """Always true: outputs are returned when they have ended."""
        return True

    def __repr__(self) -> str:
        what = f"error={self.error!r}" if self.error is not None else f"outputs={self._outputs!r}"
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids!r}, {what})"
        )


def logprobs_of(
    tokens: Sequence[TokenId], logprobs: Sequence[TokenLogprobs], codec: TextCodec
) -> list[dict[int, Logprob]]:
    """Returns, for each token, the log-probabilities of its alternatives and its own."""
    return [
        _entry(token, alternatives, codec)
        for token, alternatives in zip(tokens, logprobs, strict=True)
    ]


def _entry(token: TokenId, logprobs: TokenLogprobs, codec: TextCodec) -> dict[int, Logprob]:
    entries: dict[int, Logprob] = {}
    for rank, (other, logprob) in enumerate(logprobs.top, start=1):
        entries[other] = Logprob(logprob, rank, _text_of(other, codec))
    entries.setdefault(token, Logprob(logprobs.logprob, None, _text_of(token, codec)))
    return entries


def _text_of(token: TokenId, codec: TextCodec) -> str:
    return codec.token_bytes(token).decode(errors="replace")


def total_of(logprobs: Sequence[Mapping[int, Logprob]], tokens: Sequence[TokenId]) -> float:
    return sum(entry[token].logprob for entry, token in zip(logprobs, tokens, strict=True))
