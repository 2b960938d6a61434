"""Which tokens may follow a text: by its grammar, by a list of allowed tokens, by words to avoid.

Functions of the tokens alone, so that a row has the same mask with speculation on and off.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import and_
from typing import Protocol

import numpy as np

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars.matcher import TokenMatcher
from eesd_dist.types import SamplingParams

_WORD_BITS = 32


class TokenConstraint(Protocol):
    """Reads one text, and says what may come next. One thread at a time.

    A mask has one bit for each token of the vocabulary, the lowest bit of the first byte for token
    0, in whole words of 32.
    """

    def read(self, tokens: Sequence[int]) -> None:
        """Reads the tokens of the text that it has not read yet."""
        ...

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        """Returns the tokens that may follow the text and this draft. Has no meaning where a token
        of the draft is not allowed itself."""
        ...


class AllowedTokens:
    """A list of tokens, at every place."""

    def __init__(self, token_ids: Sequence[int], *, vocab_size: int) -> None:
        self._mask = _mask_of(token_ids, vocab_size=vocab_size)

    def read(self, tokens: Sequence[int]) -> None:
        del tokens

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        del draft
        return self._mask


class BadWords:
    """Sequences of tokens that the text must not have: the last token of one is excluded where the
    others precede it. As in vLLM, the prompt is not part of the text."""

    def __init__(self, words: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        self._excluded: dict[tuple[int, ...], list[int]] = {}
        """The tokens before the last one of words -> their last ones."""
        for word in words:
            self._excluded.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._excluded})
        self._mask = bytearray(_mask_of(range(vocab_size), vocab_size=vocab_size))
        """Mask without the words of one token."""
        _clear(self._mask, self._excluded.pop((), ()))
        self._tail: tuple[int, ...] = ()

    def read(self, tokens: Sequence[int]) -> None:
        self._tail = tuple(tokens[max(0, len(tokens) - self._lengths[-1]) :])

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        text = (*self._tail, *draft)
        mask = self._mask
        for length in self._lengths:
            excluded = self._excluded.get(text[len(text) - length :]) if length else None
            if excluded is not None:
                mask = bytearray(mask) if mask is self._mask else mask
                _clear(mask, excluded)
        return bytes(mask)


def common(masks: Sequence[bytes], *, ends: bytes) -> bytes:
    """Returns the tokens that all of several masks allow. Where they leave none, the text ends:
    `ends` is the mask of the tokens that end it."""
    if len(masks) == 1:
        return masks[0]
    mask = reduce(and_, (int.from_bytes(row, "little") for row in masks))
    return mask.to_bytes(len(masks[0]), "little") if mask else ends


def masks_along(matcher: TokenMatcher, draft: Sequence[int]) -> list[bytes]:
    """Returns the masks after no token of a draft, the first, the first two and so on, as far as
    its tokens are allowed: one mask more than there are such tokens."""
    masks = [matcher.mask_after()]
    for count, token in enumerate(draft, start=1):
        if not is_allowed(masks[-1], token):
            break
        masks.append(matcher.mask_after(draft[:count]))
    return masks


def is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def lists_of(sampling: SamplingParams, *, vocab_size: int) -> list[TokenConstraint]:
    """Returns what restricts a text with these parameters in addition to its grammar. Raises
    RequestError for tokens outside the vocabulary and words without tokens."""
    _check(sampling, vocab_size=vocab_size)
    lists: list[TokenConstraint] = []
    if sampling.allowed_token_ids is not None:
        lists.append(AllowedTokens(sampling.allowed_token_ids, vocab_size=vocab_size))
    if sampling.bad_words:
        lists.append(BadWords(sampling.bad_words, vocab_size=vocab_size))
    return lists


def ends_of(sampling: SamplingParams, *, vocab_size: int) -> bytes:
    """Returns the mask of the tokens that end a text; any token where there are none."""
    # Some checkpoints name end tokens outside the vocabulary.
    ends = [token for token in sampling.stop_token_ids if token < vocab_size]
    return _mask_of(ends or range(vocab_size), vocab_size=vocab_size)


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
