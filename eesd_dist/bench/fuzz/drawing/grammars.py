"""Grammars of drawn requests, over a tokenizer for any vocabulary: tokens are pieces of JSON."""

from collections.abc import Mapping, Sequence
from random import Random

from eesd_dist.model.spec import ModelSpec
from eesd_dist.text.grammars import (
    GrammarCompiler,
    any_json,
    json_schema,
    one_of,
    regular_expression,
    rules,
)
from eesd_dist.types import TokenId

_SINGLE = '{}[]":,. abcdefghij0123456789-+_klmnopqrstuvwxyz\n\\/AB'
_DOUBLE = ('":', '",', ", ", '"}', '"]', '{"', '["', "tr", "ue", "nu", "ll", "00", "}}", "aa", "é")


class PieceCodec:
    """`TextCodec` of a model without a tokenizer: tokens are single characters, pairs, and pairs
    again, as far as the vocabulary goes."""

    raw_byte_ids: frozenset[TokenId] = frozenset()

    def __init__(self, spec: ModelSpec) -> None:
        self.vocab_size = spec.vocab_size
        self.eos_token_ids = tuple(map(TokenId, spec.eos_token_ids))
        self.special_token_ids = frozenset(self.eos_token_ids)
        strings = [*_SINGLE, *_DOUBLE]
        self._token_texts = [strings[at % len(strings)].encode() for at in range(spec.vocab_size)]
        self._token_of: dict[bytes, TokenId] = {}
        for at, content in enumerate(self._token_texts):
            if at not in self.special_token_ids:
                self._token_of.setdefault(content, TokenId(at))

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[TokenId, ...]:
        """Leaves out what the vocabulary lacks: grammars only ask how they would write a text."""
        token_ids = (self._token_of.get(char.encode()) for char in prompt)
        return tuple(token for token in token_ids if token is not None)

    @property
    def tool_template(self) -> None:
        return None

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], /, **template_options: object
    ) -> tuple[TokenId, ...]:
        raise AssertionError("a model without a tokenizer has no conversations")

    def decode(self, tokens: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: TokenId) -> bytes:
        return b"" if token in self.special_token_ids else self._token_texts[token]


def grammars_of(spec: ModelSpec) -> GrammarCompiler:
    return GrammarCompiler(lambda: PieceCodec(spec))


def draw_grammar(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        schema = (
            {"type": "object", "properties": {}, "required": []} if kind < 0.1 else _schema(rng)
        )
        return json_schema(schema, **rng.choice(({}, {"whitespace": None})))
    if kind < 0.6:
        return any_json()
    if kind < 0.75:
        return regular_expression(
            rng.choice(("[a-c]{2,9}(, [0-9]{1,3})*", "(a|b)*a(a|b){5}", ".{0,40}", "(ab?){3,}x"))
        )
    if kind < 0.9:
        return one_of(rng.sample(("aa", "ab", "a", "abc", "no", "yes", "true, null"), 3))
    return rules(rng.choice(('root ::= "a" root "b" | "c"', 'start: "x" /[a-j]+/ ("," start)?')))


def _schema(rng: Random, *, depth: int = 0) -> dict[str, object]:
    kind = rng.randrange(4 if depth > 2 else 6)
    if kind == 0:
        return {"type": "string", "maxLength": rng.randint(1, 9)}
    if kind == 1:
        return {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 999)}
    if kind == 2:
        return {"enum": rng.sample(["a", "bb", None, True, 3], 2)}
    if kind == 3:
        return {"anyOf": [{"type": "null"}, {"type": "boolean"}]}
    if kind == 4:
        return {"type": "array", "items": _schema(rng, depth=depth + 1), "maxItems": 3}
    names = rng.sample("abcdef", rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth=depth + 1) for name in names},
        "required": names[: rng.randint(0, 3)],
        "additionalProperties": False,
    }
