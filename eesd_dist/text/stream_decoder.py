"""Text out of tokens as they come.

A character leaves when its last byte is there, whatever the tokens' borders; an unfinished
sequence is held back and, when the stream ends, never shown. Bytes that can no longer become a
character are shown as U+FFFD, as decoding everything at once would show them. The text does not
depend on how many tokens come at a time.
"""

import codecs
from collections.abc import Sequence

from eesd_dist.text.tokenizer import TextCodec
from eesd_dist.types import TokenId

_NewDecoder = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """One text that continues a prompt; its first space is part of it."""

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skipped = codec.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = _NewDecoder(errors="replace")

    def feed(self, tokens: Sequence[TokenId]) -> str:
        """The text that these tokens complete."""
        return "".join(self.feed_one(token) for token in tokens)

    def feed_one(self, token: TokenId) -> str:
        if token in self._skipped:
            return ""
        return self._utf8.decode(self._codec.token_bytes(token))
