"""Fields of the HTTP API and of `eesd_dist.LLM` for how the tokens of an answer are chosen and
where it ends, and the parameters that they become for one vocabulary."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from eesd_dist.errors import RequestError
from eesd_dist.parameters.fields import MAX_ENTRIES, Fields, check_number
from eesd_dist.parameters.structured_output import StructuredFields, naming
from eesd_dist.text import TextCodec
from eesd_dist.text.sampling_defaults import SamplingDefaults
from eesd_dist.types import SamplingParams, TokenId

_MAX_STOPS = 16
_LENGTHS = ("max_completion_tokens", "max_tokens")
_TOP_K_OF_ALL = 2**31 - 1
"""More than any vocabulary has; larger values mean the same."""
_ID_DIGITS = 20
"""Longer than any token id; Python refuses to read numbers of thousands of digits."""


Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""64 bits, read with or without a sign: -1 and 2**64 - 1 are one seed."""
NumAlternatives = Annotated[int, Field(ge=0, le=20)]


class SamplingFields(Fields, StructuredFields):
    """Fields for how the tokens of an answer are chosen and where it ends, in the names of OpenAI
    and vLLM."""

    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time that the answer has it."""
    presence_penalty: Penalty = 0.0
    """Subtracted from a token's logit if the answer has it."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Divides the logits of tokens that the prompt or the answer has; multiplies negative ones."""
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(check_number)] = {}
    """Token id to the value that is added to its logit."""
    temperature: Temperature = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keeps the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0 and -1 keep the whole vocabulary."""
    min_p: Probability = 0.0
    """Keeps tokens with at least this share of the likeliest one's probability."""
    seed: Seed | None = None
    """Drawn at random when absent; `metrics.seed` of the response reports it."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Number of answers; the first is that of `n: 1`."""
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] = []
    """Texts that end the answer."""
    stop_token_ids: Annotated[
        list[NonNegativeInt], Field(max_length=MAX_ENTRIES, fail_fast=True)
    ] = []
    """Tokens that end the answer, like the model's end tokens."""
    allowed_token_ids: (
        Annotated[list[NonNegativeInt], Field(min_length=1, fail_fast=True)] | None
    ) = None
    """The only tokens that may be generated; the end token too only if it is among them."""
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_ENTRIES, fail_fast=True)] = []
    """Words that must not be generated, also after a blank."""
    include_stop_str_in_output: bool = False
    """Includes in the answer the stop text or token that ended it."""
    ignore_eos: bool = False
    """Treats the model's end tokens as tokens like others."""
    max_tokens: PositiveInt | None = None
    """Most tokens of the answer; what the context has room for in a chat, 16 in a completion."""
    min_tokens: NonNegativeInt = 0
    """No end token and no stop text ends the answer before."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text."""
    prompt_logprobs: NumAlternatives | None = None
    """Number of alternatives reported for every token of the prompt but the first; not in
    streams."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_ids(ids: Sequence[int], codec: TextCodec, *, param: str) -> None:
    """Raises RequestError for ids that the vocabulary lacks."""
    bad = next((i for i in ids if i >= codec.vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"{param}: token id {bad} is not below the vocabulary of {codec.vocab_size}",
            param=param,
        )


AnyFields = TypeVar("AnyFields", bound=SamplingFields)


def with_defaults(fields: AnyFields, defaults: SamplingDefaults) -> AnyFields:
    """Returns a request with the checkpoint's values where it states none."""
    stated = defaults.stated()
    max_new_tokens = stated.pop("max_new_tokens", None)
    changed: dict[str, object] = {
        name: value for name, value in stated.items() if name not in fields.model_fields_set
    }
    if max_new_tokens is not None:
        lengths = {name for name in _LENGTHS if getattr(fields, name, None) is not None}
        for name in lengths or {"max_tokens"}:
            value = getattr(fields, name)
            changed[name] = max_new_tokens if value is None else min(value, max_new_tokens)
    return fields.model_copy(update=changed) if changed else fields


def sampling_params(
    fields: SamplingFields,
    codec: TextCodec,
    *,
    max_tokens: int,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str | None,
) -> SamplingParams:
    """Returns the parameters that all choices have in common; `max_tokens`: the fewest.

    Raises RequestError for token ids that the vocabulary lacks and for a length that cannot be.
    """
    if fields.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {fields.min_tokens}, more than the {max_tokens} tokens that may "
            "be generated",
            param="min_tokens",
        )
    check_ids(fields.stop_token_ids, codec, param="stop_token_ids")
    check_ids(fields.allowed_token_ids or (), codec, param="allowed_token_ids")
    ends = () if fields.ignore_eos else codec.eos_token_ids
    return SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=min(max(fields.top_k, 0), _TOP_K_OF_ALL),
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_logit_bias(fields.logit_bias, codec),
        min_tokens=fields.min_tokens,
        stop_token_ids=tuple(dict.fromkeys((*ends, *fields.stop_token_ids))),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        allowed_token_ids=(
            None
            if fields.allowed_token_ids is None
            else tuple(sorted(set(fields.allowed_token_ids)))
        ),
        bad_words=_bad_words(fields.bad_words, codec),
    )


def choice_seed(seed: int, i: int) -> int:
    """Returns the seed of the i-th choice, below 2**64. The first has the request's seed: `n` does
    not change it."""
    if i == 0:
        return seed % 2**64
    digest = hashlib.sha256(f"choice {i} of {seed % 2**64}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _bad_words(words: Sequence[str], codec: TextCodec) -> tuple[tuple[TokenId, ...], ...]:
    """Returns each word's tokens at the beginning of a text and after a blank, as vLLM does."""
    with naming("bad_words"):
        encoded = dict.fromkeys(
            codec.encode(written, add_special_tokens=False)
            for word in words
            for written in (word, f" {word.lstrip()}")
        )
    return tuple(tokens for tokens in encoded if tokens)


def _logit_bias(bias: Mapping[str, float], codec: TextCodec) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) < _ID_DIGITS):
            raise RequestError(
                f"logit_bias: '{key[:_ID_DIGITS]}' is not a token id", param="logit_bias"
            )
    entries = {int(key): float(value) for key, value in bias.items()}
    check_ids(list(entries), codec, param="logit_bias")
    return tuple(sorted(entries.items()))
