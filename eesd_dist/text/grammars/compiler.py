"""Compiles grammars for one vocabulary, and keeps the latest.

Grammars come from clients. Their size, the states that compiling and matching may make, and the
work of one step are bounded; those that need more are refused, in most cases before a text begins.
"""

import hashlib
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars.matcher import BackgroundReader, TokenMatcher
from eesd_dist.text.tokenizer import TextCodec, Tokenizer

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 1 << 18
_NUM_KEPT = 32
_NUM_VALID = 4096
_NUM_TRIED = 8
_UNSUPPORTED = re.compile(r"Unimplemented keys: (\[.*\])")
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""A step of a text within these takes less than 0.1 s, most less than 0.1 ms. Compiling is not
bounded by them: see `probe`."""
_LIMITS = LLParserLimits(**LIMITS)


class GrammarCompiler:
    """Compiles grammars; from any thread."""

    def __init__(
        self, load: Callable[[], TextCodec], *, probe: Callable[[str], None] = lambda _: None
    ) -> None:
        """`load`: called once, for the first grammar: reading a large vocabulary takes seconds.
        `probe`: raises RequestError for a grammar that must not be compiled in this process."""
        self._load = load
        self._probe = probe
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._valid: OrderedDict[bytes, None] = OrderedDict()
        """Digests of grammars that were compiled once."""
        self._reader: BackgroundReader | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Compiles for the tokenizer of a checkpoint folder."""
        return cls(lambda: Tokenizer.load(folder))

    def load(self) -> None:
        """Reads the vocabulary now. One that cannot be read is a matter of the requests that need
        it."""
        with self._lock:
            try:
                self._tokenizer_now()
            except Exception as error:  # whatever is wrong with the files of a tokenizer
                logger.warning("no grammar can be compiled: error=%r", error)

    def kept_matcher(self, grammar: str, *, ends: Sequence[int]) -> TokenMatcher | None:
        """Returns a matcher at the start of a text that these tokens end; None where the grammar,
        which was compiled before, would have to be compiled again.

        Raises RequestError as `matcher` and `require_end` do.
        """
        with self._lock:
            must_compile = grammar not in self._cache and digest_of(grammar) in self._valid
        matcher = None if must_compile else self.matcher(grammar)
        self.require_end(ends)
        return matcher

    def require_end(self, ends: Sequence[int]) -> None:
        """Raises RequestError where a text that these tokens end could not end with a grammar.
        Compiles nothing."""
        with self._lock:
            ends_of_model = set(self._tokenizer_now().eos_tokens)
        if not ends_of_model & set(ends):
            raise RequestError(
                "a text with a grammar ends with the model's end token: leave out ignore_eos",
                param="ignore_eos",
            )

    def is_valid(self, grammar: str) -> bool:
        """Returns whether this grammar was compiled before; False for one that is not known."""
        with self._lock:
            return digest_of(grammar) in self._valid

    def check(self, grammar: str) -> None:
        """Raises RequestError for a grammar that cannot be used; compiles it where it is not known.
        The grammar is not kept: it is matched in other processes."""
        if self.is_valid(grammar):
            return
        with self._lock:
            tokenizer = self._tokenizer_now()
        self._compiled(tokenizer, grammar)
        self._note_valid(grammar)

    def matcher(self, grammar: str) -> TokenMatcher:
        """Returns a matcher at the start of a text.

        Raises RequestError for a grammar that is wrong, not supported or too complex.
        """
        with self._lock:
            tokenizer = self._tokenizer_now()
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
        if compiled is None:
            compiled = self._compiled(tokenizer, grammar)
            self._keep(grammar, compiled)
        return self._copy_of(tokenizer, grammar, compiled)

    def _compiled(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        """Compiles a grammar and matches a few tokens: most of those that need too much work fail
        there, and not in the middle of a text."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"the grammar has {len(grammar)} characters, expected at most {MAX_GRAMMAR_BYTES}: "
                "send a smaller one"
            )
        self._probe(grammar)
        compiled = _compile(tokenizer, grammar)
        error = compiled.get_error() or _error_at_once(compiled.deep_copy(), tokenizer)
        if error:
            raise RequestError(_reason(error))
        return compiled

    def _copy_of(self, tokenizer: LLTokenizer, grammar: str, compiled: LLMatcher) -> TokenMatcher:
        def compile_again() -> LLMatcher:
            with self._lock:
                if self._cache.get(grammar) is compiled:
                    del self._cache[grammar]  # the next text would not get far with its states
            return _compile(tokenizer, grammar)

        return TokenMatcher(
            compiled.deep_copy(),
            vocab_size=tokenizer.vocab_size,
            recompile=compile_again,
            reader=self._reader,
        )

    def _keep(self, grammar: str, compiled: LLMatcher) -> None:
        self._note_valid(grammar)
        with self._lock:
            self._cache[grammar] = compiled
            self._cache.move_to_end(grammar)
            while len(self._cache) > _NUM_KEPT:
                self._cache.popitem(last=False)

    def _note_valid(self, grammar: str) -> None:
        with self._lock:
            self._valid[digest_of(grammar)] = None
            self._valid.move_to_end(digest_of(grammar))
            while len(self._valid) > _NUM_VALID:
                self._valid.popitem(last=False)

    def _tokenizer_now(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = _vocabulary(self._load())
            num_words = -(-self._tokenizer.vocab_size // 32)
            self._reader = BackgroundReader(_ended(self._tokenizer), num_words=num_words)
        return self._tokenizer


def digest_of(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(errors="surrogatepass"), digest_size=16).digest()


def _error_at_once(compiled: LLMatcher, tokenizer: LLTokenizer) -> str:
    """Returns what goes wrong in the first tokens; empty: nothing."""
    matcher = TokenMatcher(compiled, vocab_size=tokenizer.vocab_size, recompile=None)
    ends, text = set(tokenizer.eos_tokens), list[int]()
    for _ in range(_NUM_TRIED):
        mask = matcher.mask_after()
        allowed = (
            8 * at + bit
            for at, byte in enumerate(mask)
            if byte
            for bit in range(8)
            if byte >> bit & 1
        )
        token = next((candidate for candidate in allowed if candidate not in ends), None)
        if compiled.is_error() or token is None:
            break
        text.append(token)
        matcher.read(text)
    return str(compiled.get_error())


def _reason(error: str) -> str:
    first = error.partition("\n")[0]
    if names := _unsupported(first):
        return f"found keywords of JSON Schema that are not supported: {names}; leave them out"
    if "oneOf constraints are not supported" in first:
        return (
            "found oneOf whose alternatives may overlap, which cannot be told apart while a text "
            "is written: use anyOf, or let them differ in type or in a property with a const"
        )
    cause = re.search(r"^error: (.*)$", error, re.MULTILINE)
    return f"the grammar cannot be used: {cause[1] if cause else first}"


def _unsupported(error: str) -> str:
    """Returns the keywords that an error names; empty for another error, which may quote what a
    client has sent."""
    match = _UNSUPPORTED.search(error)
    try:
        names = json.loads(match[1]) if match is not None else []
    except ValueError:
        return ""
    return ", ".join(names) if all(isinstance(name, str) for name in names) else ""


def _ended(tokenizer: LLTokenizer) -> LLMatcher:
    """Returns a matcher that takes no token."""
    matcher = LLMatcher(tokenizer, 'start: "a"', log_level=0)
    matcher.consume_tokens([*tokenizer.tokenize_str("b"), tokenizer.eos_token])
    return matcher


def _compile(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


def _vocabulary(codec: TextCodec) -> LLTokenizer:
    """Returns the bytes of each token for llguidance. Raises RequestError for a model without an
    end token: a text that has matched its grammar could not end."""
    ends = [int(token) for token in codec.eos_token_ids]
    if not ends:
        raise RequestError("this model has no end token, so that no text can end with its grammar")
    wrapper = TokenizerWrapper(_Codec(codec, end=ends[0]))
    return LLTokenizer(wrapper, n_vocab=codec.vocab_size, eos_token=ends)


class _Codec:
    """A tokenizer as llguidance reads it."""

    def __init__(self, codec: TextCodec, *, end: int) -> None:
        self._codec = codec
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [t for t in codec.special_token_ids if t < codec.vocab_size]
        self.tokens = [codec.token_bytes(token) for token in range(codec.vocab_size)]  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        try:
            return list(self._codec.encode(text, add_special_tokens=False))
        except RequestError:  # the tokenizer's tokens for it are not all the model's
            return self._spelled(text.encode())

    def _spelled(self, text: bytes) -> list[int]:
        """Returns the model's tokens of a text, the longest first."""
        token_of = {token: id_ for id_, token in enumerate(self.tokens) if token}
        lengths, tokens = sorted({len(token) for token in token_of}, reverse=True), list[int]()
        while text:
            length = next(n for n in lengths if text[:n] in token_of)
            tokens.append(token_of[text[:length]])
            text = text[length:]
        return tokens
