"""A tokenizer for the smallest vocabulary of the tests: tokens from 3 on are one or two characters
of JSON each, 2 ends a text."""

from collections.abc import Mapping, Sequence

from eesd_dist.text.grammars import GrammarCompiler
from eesd_dist.types import TokenId

_SINGLE = '{}[]":,. -+_abcdefghijklmnopqrstuvwxyzABCDEFG0123456789\n\t\\/'
_DOUBLE = [
    '":',
    '",',
    ", ",
    '"}',
    '"]',
    '{"',
    '["',
    "tr",
    "ue",
    "fa",
    "ls",
    "nu",
    "ll",
    "00",
    "}}",
    "é",
]


class JsonCodec:
    """`TextCodec` over JSON."""

    vocab_size = 96
    eos_token_ids = (TokenId(2),)
    special_token_ids = frozenset({TokenId(0), TokenId(1), TokenId(2)})
    raw_byte_ids: frozenset[TokenId] = frozenset()
    texts = (*_SINGLE, *_DOUBLE)

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[TokenId, ...]:
        return tuple(TokenId(3 + self.texts.index(character)) for character in prompt)

    @property
    def tool_template(self) -> None:
        return None

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], /, **template_options: object
    ) -> tuple[TokenId, ...]:
        raise AssertionError("not used")

    def decode(self, tokens: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: TokenId) -> bytes:
        at = token - 3
        return self.texts[at].encode() if 0 <= at < len(self.texts) else b""


def json_grammars() -> GrammarCompiler:
    return GrammarCompiler(JsonCodec)
