"""The parameters of sampling and speculation that a request's fields ask for, checked against the
vocabulary of the served model."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from eesd_dist.errors import RequestError
from eesd_dist.text import TextCodec
from eesd_dist.text.sampling_defaults import SamplingDefaults
from eesd_dist.types import SamplingParams, SpeculationParams, TokenId
from serve_app.openai.schema import GenerationFields, naming

AnyFields = TypeVar("AnyFields", bound=GenerationFields)

_LENGTHS = ("max_completion_tokens", "max_tokens")
_TOP_K_OF_ALL = 2**31 - 1
"""More than any vocabulary has; larger values mean the same."""
_ID_DIGITS = 20
"""Longer than any token id; Python refuses to read numbers of thousands of digits."""


def check_ids(ids: Sequence[int], codec: TextCodec, *, param: str) -> None:
    """Raises RequestError for ids that the vocabulary lacks."""
    bad = next((i for i in ids if i >= codec.vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"{param}: token id {bad} is not below the vocabulary of {codec.vocab_size}",
            param=param,
        )


def with_defaults(fields: AnyFields, defaults: SamplingDefaults) -> AnyFields:
    """Returns a request with the checkpoint's values where it states none."""
    stated = defaults.stated()
    most = stated.pop("max_new_tokens", None)
    changed: dict[str, object] = {
        name: value for name, value in stated.items() if name not in fields.model_fields_set
    }
    if most is not None:
        asked = {name for name in _LENGTHS if getattr(fields, name, None) is not None}
        for name in asked or {"max_tokens"}:
            value = getattr(fields, name)
            changed[name] = most if value is None else min(value, most)
    return fields.model_copy(update=changed) if changed else fields


def sampling_params(
    fields: GenerationFields,
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


def speculation_params(fields: GenerationFields) -> SpeculationParams:
    """Returns what the client asks of drafting; the engine's own limits apply as well."""
    asked = fields.speculation
    return SpeculationParams(
        mode=asked.mode,
        controller=asked.controller,
        max_draft_tokens=asked.max_draft_tokens,
        tree=asked.tree,
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
        found = dict.fromkeys(
            codec.encode(written, add_special_tokens=False)
            for word in words
            for written in (word, f" {word.lstrip()}")
        )
    return tuple(tokens for tokens in found if tokens)


def _logit_bias(bias: Mapping[str, float], codec: TextCodec) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) < _ID_DIGITS):
            raise RequestError(
                f"logit_bias: '{key[:_ID_DIGITS]}' is not a token id", param="logit_bias"
            )
    entries = {int(key): float(value) for key, value in bias.items()}
    check_ids(list(entries), codec, param="logit_bias")
    return tuple(sorted(entries.items()))
