"""Incremental decoding of tokens to text.

A character is returned when its last byte has arrived, in whichever token. An incomplete sequence
is held back and, when the stream ends, never shown. Bytes that cannot become a character are shown
as U+FFFD, as in decoding all tokens at once. A run of `<0x..>` tokens is one text or none, as in
transformers: it is held back until another token follows or the stream ends. The text does not
depend on how many tokens arrive at a time.
"""

import codecs
from collections.abc import Collection, Sequence

from eesd_dist.text.pieces import text_of_raw_bytes
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
        self._run = b""
        """Bytes of the `<0x..>` tokens since the last other token."""

    def feed(self, tokens: Sequence[TokenId]) -> str:
        """Returns the text that these tokens complete."""
        return "".join(self.feed_one(token) for token in tokens)

    def feed_one(self, token: TokenId) -> str:
        if token in self._skipped:
            return ""
        content = self._codec.token_bytes(token)
        if token in self._codec.raw_byte_ids:
            self._run += content
            return ""
        run, self._run = self._run, b""
        return text_of_raw_bytes(run) + self._utf8.decode(content)

    def finish(self) -> str:
        """Returns the text held back, when no token follows."""
        run, self._run = self._run, b""
        return text_of_raw_bytes(run, may_continue=True)
