"""The toy tokenizer: a token is a byte, and 256 ends the text. Needs no library."""

from collections.abc import Mapping, Sequence

from eesd_dist.types import TokenId

END = TokenId(256)


class ByteCodec:
    """`TextCodec` over bytes."""

    vocab_size = 257
    eos_token_ids = (END,)
    special_token_ids = frozenset({END})
    raw_byte_ids: frozenset[TokenId] = frozenset()

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[TokenId, ...]:
        return tuple(TokenId(byte) for byte in prompt.encode())

    @property
    def tool_template(self) -> None:
        return None

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], /, **template_options: object
    ) -> tuple[TokenId, ...]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, tokens: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(token) for token in tokens).decode(errors="replace")

    def token_bytes(self, token: TokenId) -> bytes:
        return b"" if token == END else bytes([token])
