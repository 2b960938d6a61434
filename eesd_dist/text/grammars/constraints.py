"""Which tokens may follow a text: by its grammar, by a list of allowed tokens, by words to avoid.

Functions of the tokens alone, so that a row has the same mask with speculation on and off.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars.compiler import GrammarCompiler
from eesd_dist.types import SamplingParams

_WORD_BITS = 32


class TokenConstraint(Protocol):
    """Reads one text, and says what may come next. One thread at a time.

    A mask has one bit for each token of the vocabulary, the lowest bit of the first byte for token
    0, in whole words of 32.
    """

    @property
    def failure(self) -> str | None:
        """Why the text cannot go on; None: it can."""
        ...

    def read(self, tokens: Sequence[int], *, start: int = 0) -> None:
        """Reads the tokens of the text, from `start` on, that it has not read yet."""
        ...

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        """Returns the tokens that may follow the text and this draft. Has no meaning where a token
        of the draft is not allowed itself."""
        ...


class AllowedTokens:
    """A list of tokens, at every place."""

    failure = None

    def __init__(self, token_ids: Sequence[int], *, vocab_size: int) -> None:
        self._mask = _mask_of(token_ids, vocab_size=vocab_size)

    def read(self, tokens: Sequence[int], *, start: int = 0) -> None:
        del tokens, start

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        del draft
        return self._mask


class BadWords:
    """Sequences of tokens that the text must not have: the last token of one is excluded where the
    others precede it. As in vLLM, the prompt is not part of the text."""

    failure = None

    def __init__(self, words: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        self._excluded: dict[tuple[int, ...], list[int]] = {}
        """The tokens before the last one of words -> their last ones."""
        for word in words:
            self._excluded.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._excluded})
        self._mask = bytearray(_mask_of(range(vocab_size), vocab_size=vocab_size))
        """Without the words of one token."""
        _clear(self._mask, self._excluded.pop((), ()))
        self._tail: tuple[int, ...] = ()

    def read(self, tokens: Sequence[int], *, start: int = 0) -> None:
        self._tail = tuple(tokens[max(start, len(tokens) - self._lengths[-1]) :])

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        text = (*self._tail, *draft)
        mask = self._mask
        for length in self._lengths:
            found = self._excluded.get(text[len(text) - length :]) if length else None
            if found is not None:
                mask = bytearray(mask) if mask is self._mask else mask
                _clear(mask, found)
        return bytes(mask)


class AllOf:
    """Several constraints at once. Where they leave no token, the text ends."""

    def __init__(self, constraints: Sequence[TokenConstraint], *, ends: bytes) -> None:
        """`ends`: mask of the tokens that end the text; any token where there are none."""
        self._constraints = constraints
        self._ends = ends

    @property
    def failure(self) -> str | None:
        failures = (each.failure for each in self._constraints)
        return next((failure for failure in failures if failure is not None), None)

    def read(self, tokens: Sequence[int], *, start: int = 0) -> None:
        for each in self._constraints:
            each.read(tokens, start=start)

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        first, *others = (each.mask_after(draft) for each in self._constraints)
        mask = int.from_bytes(first, "little")
        for other in others:
            mask &= int.from_bytes(other, "little")
        return mask.to_bytes(len(first), "little") if mask else self._ends


def masks_along(constraint: TokenConstraint, draft: Sequence[int]) -> list[bytes]:
    """Returns the masks after no token of a draft, the first, the first two and so on, as far as
    its tokens are allowed: one mask more than there are such tokens."""
    masks = [constraint.mask_after()]
    for count, token in enumerate(draft, start=1):
        if not masks[-1][token >> 3] >> (token & 7) & 1:
            break
        masks.append(constraint.mask_after(draft[:count]))
    return masks


def constraint_of(
    sampling: SamplingParams, *, grammars: GrammarCompiler | None, vocab_size: int
) -> TokenConstraint | None:
    """Returns what restricts a text with these parameters; None: nothing. Raises RequestError for
    tokens outside the vocabulary and words without tokens, and as `GrammarCompiler.matcher_of`
    does."""
    _check(sampling, vocab_size=vocab_size)
    found: list[TokenConstraint] = []
    if sampling.grammar is not None:
        if grammars is None:
            raise RequestError("this engine has no tokenizer, which grammars need")
        found.append(grammars.matcher_of(sampling.grammar, ends=sampling.stop_token_ids))
    if sampling.allowed_token_ids is not None:
        found.append(AllowedTokens(sampling.allowed_token_ids, vocab_size=vocab_size))
    if sampling.bad_words:
        found.append(BadWords(sampling.bad_words, vocab_size=vocab_size))
    if not found:
        return None
    if len(found) == 1 and sampling.grammar is not None:
        return found[0]
    # Some checkpoints name end tokens outside the vocabulary.
    ends = [token for token in sampling.stop_token_ids if token < vocab_size]
    return AllOf(found, ends=_mask_of(ends or range(vocab_size), vocab_size=vocab_size))


def _check(sampling: SamplingParams, *, vocab_size: int) -> None:
    words = sampling.bad_words
    if not all(words):
        raise RequestError("found a word without tokens: leave it out", param="bad_words")
    for param, tokens in (
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", tuple(chain.from_iterable(words))),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise RequestError(
                f"{param}: found tokens from {min(tokens)} to {max(tokens)}, the vocabulary is 0 "
                f"to {vocab_size - 1}",
                param=param,
            )


def _clear(mask: bytearray, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        mask[token >> 3] &= ~(1 << (token & 7))


def _num_bits(vocab_size: int) -> int:
    return -(-vocab_size // _WORD_BITS) * _WORD_BITS


def _mask_of(token_ids: Sequence[int], *, vocab_size: int) -> bytes:
    is_allowed = np.zeros(_num_bits(vocab_size), dtype=bool)
    is_allowed[np.asarray(token_ids, dtype=np.int64)] = True
    return np.packbits(is_allowed, bitorder="little").tobytes()
