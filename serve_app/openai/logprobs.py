"""Log-probabilities of the tokens of an answer and of its prompt, in the formats of OpenAI and
vLLM."""

from collections.abc import Callable, Sequence
from typing import overload

from eesd_dist.text import StreamDecoder, TextCodec
from eesd_dist.types import TokenId, TokenLogprobs
from serve_app.openai.generation import Delta
from serve_app.openai.prepared import Choice, Prepared

_Json = dict[str, object]

_MAX_MADE = 64
"""Entries of a chunk, or of a short answer, that are made at once."""
_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class TokenEntry:
    """A token with its log-probabilities and where its text begins."""

    __slots__ = ("is_text", "logprobs", "offset", "token")

    def __init__(
        self, token: TokenId, logprobs: TokenLogprobs | None, offset: int, *, is_text: bool = True
    ) -> None:
        """`logprobs`: None for the first token of a prompt. `is_text`: False for a token that the
        text does not have, such as the end token."""
        self.token = token
        self.logprobs = logprobs
        self.offset = offset
        self.is_text = is_text


_Shape = Callable[[TokenEntry], object]


class LazyList(Sequence[object]):
    """A list of which each part is made when it is written: a large answer as dictionaries would be
    a million objects, which Python's garbage collector visits again and again."""

    def __init__(self, entries: Sequence[TokenEntry], shape: _Shape) -> None:
        self._entries = entries
        self._shape = shape

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, at: int) -> object: ...
    @overload
    def __getitem__(self, at: slice) -> list[object]: ...
    def __getitem__(self, at: int | slice) -> object:
        if isinstance(at, int):
            return self._shape(self._entries[at])
        return [self._shape(entry) for entry in self._entries[at]]


class ChoiceLogprobs:
    """Log-probabilities of a growing choice, and of its prompt."""

    def __init__(self, prepared: Prepared, choice: Choice, *, codec: TextCodec) -> None:
        num_top = choice.request.sampling.top_logprobs
        self._codec = codec
        self._format = LogprobFormat(codec, num_top=num_top or 0)
        self._is_wanted = num_top is not None
        self._is_chat = prepared.kind == "chat"
        self._prompt = prepared.prompts[choice.prompt_index]
        self._echoed = prepared.echoed[choice.prompt_index]
        self._hidden = codec.special_token_ids.union(choice.request.sampling.stop_token_ids)
        """Tokens that are no part of the text where they add nothing to it."""
        self._num_prompt_top = prepared.options.prompt_logprobs
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """None before the first token."""
        self._num_chars = len(self._echoed)
        self._entries: list[TokenEntry] = []
        """Entries of the tokens that were not sent in a chunk."""

    def add(self, delta: Delta) -> None:
        if self._prompt_logprobs is None and delta.rounds:
            self._prompt_logprobs = delta.rounds[0].prompt_logprobs
        if not self._is_wanted:
            return
        for token, token_text, logprobs in zip(
            delta.text_delta.tokens, delta.text_delta.pieces, delta.text_delta.logprobs, strict=True
        ):
            is_text = bool(token_text) or token not in self._hidden
            self._entries.append(TokenEntry(token, logprobs, self._num_chars, is_text=is_text))
            self._num_chars += len(token_text)

    @property
    def has_echo(self) -> bool:
        """True if the tokens of an echoed prompt precede those of the answer."""
        return self._is_wanted and bool(self._echoed)

    def with_prompt(self) -> _Json:
        """Returns the log-probabilities of the prompt and of all tokens that were not sent."""
        return self._format.of_text([*self._prompt_entries(), *self._entries])

    def of_last(self, num_tokens: int) -> _Json | None:
        """Returns the log-probabilities of so many last tokens."""
        if not self._is_wanted:
            return None
        entries = self._entries[len(self._entries) - num_tokens :]
        return self._format.of_chat(entries) if self._is_chat else self._format.of_text(entries)

    def of_prompt(self) -> Sequence[object]:
        """Returns the log-probabilities of the prompt's tokens in vLLM's format."""
        return _listed(self._prompt_entries(), self._prompt_entry)

    def clear(self) -> None:
        """Forgets the tokens that were sent."""
        self._entries.clear()

    def _prompt_entry(self, entry: TokenEntry) -> _Json | None:
        return self._format.of_prompt(entry, num_top=self._num_prompt_top or 0)

    def _prompt_entries(self) -> list[TokenEntry]:
        """Returns the prompt's tokens, the first without a log-probability."""
        decoder, num_chars, num_stripped = StreamDecoder(self._codec), 0, 0
        entries: list[TokenEntry] = []
        prompt_logprobs = (None, *(self._prompt_logprobs or ()))
        for token, logprobs in zip(self._prompt, prompt_logprobs, strict=True):
            offset = max(num_chars - num_stripped, 0)
            entries.append(TokenEntry(token, logprobs, min(offset, len(self._echoed))))
            token_text = decoder.feed_one(token)
            if num_chars == 0 and token_text.startswith(" ") and not self._echoed.startswith(" "):
                num_stripped = 1  # some tokenizers put a blank before a text
            num_chars += len(token_text)
        return entries


class LogprobFormat:
    """Log-probabilities in the formats of completions and of chats."""

    def __init__(self, codec: TextCodec, *, num_top: int) -> None:
        self._codec = codec
        self._num_top = num_top

    def of_chat(self, entries: Sequence[TokenEntry]) -> _Json:
        return {"content": _listed(entries, self._chat_entry), "refusal": None}

    def of_text(self, entries: Sequence[TokenEntry]) -> _Json:
        return {
            "tokens": _listed(entries, lambda entry: self._text(entry.token)),
            "token_logprobs": _listed(entries, _logprob_of),
            "top_logprobs": _listed(entries, self._text_top),
            "text_offset": _listed(entries, lambda entry: entry.offset),
        }

    def of_prompt(self, entry: TokenEntry, *, num_top: int) -> _Json | None:
        """Returns a token of a prompt and its alternatives by their ids, in vLLM's format; the rank
        of a token that is not among them is not known."""
        if entry.logprobs is None:
            return None
        alternatives: _Json = {}
        pairs = [*entry.logprobs.top[:num_top], (entry.token, entry.logprobs.logprob)]
        for rank, (token, logprob) in enumerate(pairs, start=1):
            if str(token) not in alternatives:
                alternatives[str(token)] = {
                    "logprob": _finite(logprob),
                    "rank": rank if rank <= num_top else None,
                    "decoded_token": self._text(token),
                }
        return alternatives

    def _chat_entry(self, entry: TokenEntry) -> _Json:
        assert entry.logprobs is not None, "chats have no echo"
        top = [self._chat_token(token, logprob) for token, logprob in self._top(entry.logprobs)]
        chosen = self._chat_token(entry.token, entry.logprobs.logprob) | {"top_logprobs": top}
        return chosen if entry.is_text else chosen | {"bytes": []}

    def _top(self, logprobs: TokenLogprobs) -> Sequence[tuple[TokenId, float]]:
        return logprobs.top[: self._num_top]

    def _text_top(self, entry: TokenEntry) -> dict[str, float] | None:
        """Includes the chosen token, so there may be one more than asked for."""
        if entry.logprobs is None:
            return None
        pairs = [*self._top(entry.logprobs), (entry.token, entry.logprobs.logprob)]
        top: dict[str, float] = {}
        for token, logprob in pairs:
            top.setdefault(self._text(token), _finite(logprob))
        return top

    def _chat_token(self, token: TokenId, logprob: float) -> _Json:
        raw = self._codec.token_bytes(token)
        return {
            "token": raw.decode("utf-8", errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }

    def _text(self, token: TokenId) -> str:
        """Returns a token's text; a part of a character is written as bytes, as OpenAI does."""
        raw = self._codec.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _listed(
    entries: Sequence[TokenEntry], shape: Callable[[TokenEntry], object]
) -> Sequence[object]:
    listed = LazyList(entries, shape)
    return listed[:] if len(listed) <= _MAX_MADE else listed


def _logprob_of(entry: TokenEntry) -> float | None:
    return None if entry.logprobs is None else _finite(entry.logprobs.logprob)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
