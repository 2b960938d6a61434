"""Which tokens may follow one text that has to match a grammar, and each draft after it.

A function of the tokens alone: the mask of a row is the same with speculation on and off. One
thread at a time.
"""

import ctypes
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

_WORD_BITS = 32
_BEGINS_AGAIN_AFTER = 256


class TokenMatcher:
    """Reads a text token by token, and allows what may come next.

    A mask has one bit for each token of the vocabulary, the lowest bit of the first byte for token
    0. Where the text may end it allows the end tokens.
    """

    def __init__(
        self, matcher: LLMatcher, *, vocab_size: int, compile_again: Callable[[], LLMatcher] | None
    ) -> None:
        """`compile_again`: copies of one compiled grammar share the states that matching has made,
        and with them their limit; where it is reached, this text gets states of its own, and new
        ones each time it has grown by some hundred tokens. None: it fails there."""
        self._matcher = matcher
        self._compile_again = compile_again
        self._begins_again_at = 0
        """Length of the text from which it may get new states."""
        self._read: list[int] = []
        self._words = (ctypes.c_uint32 * -(-vocab_size // _WORD_BITS))()
        self._everything = b"\xff" * ctypes.sizeof(self._words)

    @property
    def failure(self) -> str | None:
        """Why no more tokens can be matched: the text needs more work than the limits of
        `compiler` allow. All tokens are allowed then."""
        error = self._matcher.get_error().partition("\n")[0]
        return f"the grammar needs more work than is allowed: {error}" if error else None

    def read(self, tokens: Sequence[int], *, start: int = 0) -> None:
        """Reads the tokens of the text, from `start` on, that it has not read yet. What it has read
        stays."""
        fresh = list(tokens[start + len(self._read) :])
        if fresh:
            self._read += fresh
            if not self._matcher.consume_tokens(fresh):
                self._begin_again()

    def mask_after(self, draft: Sequence[int] = ()) -> bytes:
        """Returns the tokens that may follow the text and this draft; all where a token of the
        draft is not allowed itself, so that none after it is chosen."""
        mask = self._mask_after(draft)
        if self._matcher.is_error() and self._begin_again():
            mask = self._mask_after(draft)
        return self._everything if self._matcher.is_error() else mask

    def _mask_after(self, draft: Sequence[int]) -> bytes:
        count = self._matcher.try_consume_tokens(list(draft)) if draft else 0
        mask = self._everything
        if count == len(draft):
            size = ctypes.sizeof(self._words)
            self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(self._words), size)
            mask = bytes(self._words)
        if count and not self._matcher.is_error():
            self._matcher.rollback(count)
        return mask

    def _begin_again(self) -> bool:
        """Reads the text with states of its own."""
        if self._compile_again is None or len(self._read) < self._begins_again_at:
            return False
        self._matcher = self._compile_again()
        self._begins_again_at = len(self._read) + _BEGINS_AGAIN_AFTER
        return not self._read or bool(self._matcher.consume_tokens(self._read))
