"""Validates requests: refuses those that could never be served.

Whether there is room for a request now is decided by the scheduler.
"""

from collections.abc import Iterable, Iterator
from math import inf, isfinite

from eesd_dist.errors import PromptTooLong, RequestError
from eesd_dist.types import Request, SamplingParams

_LARGEST = 2**31 - 1
_NUM_SEEDS = 2**64


class Gate:
    """The limits of one engine on a request."""

    def __init__(
        self, *, max_model_len: int, vocab_size: int, num_pages: int, page_size: int
    ) -> None:
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._num_pages = num_pages
        self._page_size = page_size

    def check(self, request: Request) -> None:
        """Raises RequestError that says what to change."""
        self._check_length(request)
        self._check_vocabulary((*request.prompt, *request.generated), param="prompt")
        biased = (token for token, _ in request.sampling.logit_bias)
        self._check_vocabulary(biased, param="logit_bias")
        self._check_numbers(request.sampling)
        self._check_pages(request)

    def _check_length(self, request: Request) -> None:
        num_prompt, num_generated = len(request.prompt), len(request.generated)
        max_tokens = request.sampling.max_tokens
        if num_prompt == 0:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        if num_prompt >= self.max_model_len:
            raise PromptTooLong(num_tokens=num_prompt, limit=self.max_model_len - 1)
        if max_tokens < 1:
            raise RequestError(
                f"max_tokens is {max_tokens}: ask for at least 1", param="max_tokens"
            )
        if num_generated >= min(max_tokens, self.max_model_len - num_prompt):
            raise RequestError(
                f"{num_generated} tokens were generated already, with max_tokens {max_tokens} and "
                f"{self.max_model_len} positions in the model nothing is left to generate",
                param="max_tokens",
            )

    def _check_vocabulary(self, tokens: Iterable[int], *, param: str) -> None:
        foreign = next((t for t in tokens if not 0 <= t < self._vocab_size), None)
        if foreign is not None:
            raise RequestError(
                f"{param} has token {foreign}, the vocabulary is 0 to {self._vocab_size - 1}",
                param=param,
            )

    def _check_numbers(self, sampling: SamplingParams) -> None:
        """Checks that numbers fit their fields in a round's header: others would fail the round."""
        for param, number in (("top_k", sampling.top_k), ("min_tokens", sampling.min_tokens)):
            if not 0 <= number <= _LARGEST:
                raise RequestError(f"{param} is {number}: give 0 to {_LARGEST}", param=param)
        for param, value, is_allowed, expected in _reals(sampling):
            if not is_allowed:
                raise RequestError(f"{param} is {value}: give {expected}", param=param)
        # End tokens outside the vocabulary, as some checkpoints have, are never chosen: allowed.
        if any(not 0 <= token <= _LARGEST for token in sampling.stop_token_ids):
            raise RequestError(
                f"stop_token_ids are {list(sampling.stop_token_ids)}: give 0 to {_LARGEST}",
                param="stop_token_ids",
            )
        if not -_NUM_SEEDS // 2 <= sampling.seed < _NUM_SEEDS:
            raise RequestError(
                f"seed is {sampling.seed}: give one of 64 bits, -2**63 to 2**64 - 1", param="seed"
            )

    def _check_pages(self, request: Request) -> None:
        longest = min(len(request.prompt) + request.sampling.max_tokens, self.max_model_len)
        # The last token is never computed, so it needs no position.
        num_needed = -(-(longest - 1) // self._page_size)
        if num_needed > self._num_pages:
            raise RequestError(
                f"prompt and max_tokens together need {num_needed} pages of {self._page_size} "
                f"tokens, the cache has {self._num_pages} ({self._num_pages * self._page_size} "
                "tokens): lower max_tokens, or raise cache.kv_cache_bytes",
                param="max_tokens",
            )


def _reals(sampling: SamplingParams) -> Iterator[tuple[str, float, bool, str]]:
    """Yields parameter, value, whether it is allowed, what is. Comparisons with NaN are false."""
    s = sampling
    yield "temperature", s.temperature, 0.0 <= s.temperature < inf, "0 or more"
    yield "top_p", s.top_p, 0.0 <= s.top_p <= 1.0, "0 to 1"
    yield "min_p", s.min_p, 0.0 <= s.min_p <= 1.0, "0 to 1"
    penalty = s.repetition_penalty
    yield "repetition_penalty", penalty, 0.0 < penalty < inf, "more than 0"
    for param in ("presence_penalty", "frequency_penalty"):
        value = getattr(s, param)
        yield param, value, isfinite(value), "a finite number"
    for token, bias in s.logit_bias:
        yield f"logit_bias of {token}", bias, isfinite(bias), "a finite number"
