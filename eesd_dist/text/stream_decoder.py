"""Incremental decoding of tokens to text.

A character is returned when its last byte has arrived, in whichever token. An incomplete sequence
is held back and, when the stream ends, never shown. Bytes that cannot become a character are shown
as U+FFFD, as in decoding all tokens at once. The text does not depend on how many tokens arrive at
a time.
"""

import codecs
from collections.abc import Collection, Sequence

from eesd_dist.text.tokenizer import TextCodec
from eesd_dist.types import TokenId

_NewDecoder = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """Decodes one text that continues a prompt; its first space is kept."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[TokenId] = (),
    ) -> None:
        """`shown`: special tokens that are not skipped."""
        self._codec = codec
        skipped = codec.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = skipped.difference(shown)
        self._utf8 = _NewDecoder(errors="replace")

    def feed(self, tokens: Sequence[TokenId]) -> str:
        """Returns the text that these tokens complete."""
        return "".join(self.feed_one(token) for token in tokens)

    def feed_one(self, token: TokenId) -> str:
        if token in self._skipped:
            return ""
        return self._utf8.decode(self._codec.token_bytes(token))
