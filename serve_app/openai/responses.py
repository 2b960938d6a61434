"""Completion, chat and chunk objects, as OpenAI's API sends them.

Every key that OpenAI sends is there, null included.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast, overload

from eesd_dist.text import StreamDecoder, TextCodec, TextFinish
from eesd_dist.types import Emission, TokenId, TokenLogprobs
from serve_app.openai.event_ids import Shown
from serve_app.openai.generation import ChoiceTally, Delta
from serve_app.openai.prepared import Prepared
from serve_app.openai.request_metrics import metrics_of, num_cached_tokens
from serve_app.openai.tools import CallDelta, ToolCallParser

Json = dict[str, object]

_MAX_MADE = 64
"""Entries of a chunk, or of a short answer, that are made at once."""
_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Listed(Sequence[object]):
    """A list of which each part is made when it is written: a large answer as dictionaries would be
    a million objects, which Python's garbage collector visits again and again."""

    def __init__(self, entries: "Sequence[_Entry]", shape: "Callable[[_Entry], object]") -> None:
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


class Event(NamedTuple):
    """An event of a stream."""

    content: Json | None
    """None: there is nothing to send yet, and the answer begins."""
    id: bytes = b""
    """Id from which a client can resume after it; empty: where the event before it says."""
    name: bytes = b""
    """Name in a stream of named events."""


class Answer:
    """A growing response; gives chunks on the way, or the whole at the end."""

    def __init__(
        self, prepared: Prepared, *, codec: TextCodec, tallies: Sequence[ChoiceTally]
    ) -> None:
        """`tallies` are updated by the caller, as the choices run."""
        self._prepared = prepared
        self._warnings: Json = {"warnings": list(prepared.warnings)} if prepared.warnings else {}
        """Warnings for the whole answer, or the first chunk."""
        self._tallies = tallies
        self._choices = [
            _GrowingChoice(prepared, i, codec=codec) for i in range(len(prepared.choices))
        ]

    def add(self, delta: Delta) -> None:
        self._choices[delta.index].add(delta)

    def opening_events(self) -> list[Event]:
        """Returns what precedes the first token: roles in a chat, the prompt with `echo`."""
        if self._prepared.is_resumed:
            return [Event(None)]
        openings = [opening for choice in self._choices if (opening := choice.opening())]
        return [Event(self._chunk([opening])) for opening in openings]

    def event(self, delta: Delta) -> Event | None:
        """Returns the chunk of a delta; None while its text is held back, or was shown already."""
        choice = self._choices[delta.index]
        unshown = choice.unshown(delta)
        if unshown is None:
            return None
        ids = self._prepared.event_ids
        event_id = b"" if ids is None else ids.after(delta.index, choice.shown)
        return Event(self._chunk([unshown]), event_id)

    def usage_event(self) -> Event:
        chunk = self._chunk([]) | {"usage": self._usage(), "metrics": self._metrics()}
        return Event(chunk)

    @property
    def size(self) -> int:
        """Tokens, alternatives in log-probabilities and repeated prompt tokens; where calls are
        looked for, also characters."""
        size = sum(tally.num_tokens for tally in self._tallies) + self._prepared.num_extras
        if self._prepared.tool_use is not None:
            size += sum(choice.num_chars for choice in self._choices)
        return size

    def whole(self) -> Json:
        """Returns the answer; its log-probabilities may be `Listed`."""
        is_chat = self._prepared.kind == "chat"
        prompt_logprobs: Json = {}
        if is_chat and self._prepared.prompt_logprobs is not None:
            prompt_logprobs = {"prompt_logprobs": self._choices[0].prompt_logprobs()}
        return {
            **self._head("chat.completion" if is_chat else "text_completion"),
            "choices": [choice.whole() for choice in self._choices],
            **prompt_logprobs,
            "usage": self._usage(),
            "metrics": self._metrics(),
            **self._warnings,
        }

    def _chunk(self, choices: Sequence[Json]) -> Json:
        is_chat = self._prepared.kind == "chat"
        head = self._head("chat.completion.chunk" if is_chat else "text_completion")
        chunk = {**head, "choices": list(choices), **self._warnings}
        self._warnings = {}
        return chunk | {"usage": None} if self._prepared.include_usage else chunk

    def _head(self, kind: str) -> Json:
        return {
            "id": self._prepared.response_id,
            "object": kind,
            "created": self._prepared.created_unix_s,
            "model": self._prepared.model,
            "system_fingerprint": None,
        }

    def _metrics(self) -> Json:
        return metrics_of(self._prepared, self._tallies)

    def _usage(self) -> Json:
        num_prompt = sum(len(prompt) for prompt in self._prepared.prompts)
        num_completion = sum(tally.num_tokens for tally in self._tallies)
        num_cached = num_cached_tokens(self._prepared, self._tallies)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


class _GrowingChoice:
    def __init__(self, prepared: Prepared, index: int, *, codec: TextCodec) -> None:
        choice = prepared.choices[index]
        self._index = index
        self._is_chat = prepared.kind == "chat"
        self._wants_ids = prepared.return_token_ids
        self._wants_origins = prepared.return_token_origins
        self._origins: list[str] = []
        self._pieces: list[str] = []
        self._steps: list[tuple[int, int]] = []
        """Drafted and accepted tokens of the rounds with a draft that were not sent in a chunk."""
        self._wants_logprobs = choice.request.sampling.top_logprobs is not None
        self._shape = _Logprobs(codec, num_top=choice.request.sampling.top_logprobs or 0)
        self._prompt = prepared.prompts[choice.prompt_index]
        self._text = prepared.echoed[choice.prompt_index]
        self._echoed = self._text
        self._echoes_logprobs = bool(self._echoed) and self._wants_logprobs
        self._codec = codec
        self._hidden = codec.special_token_ids.union(choice.request.sampling.stop_token_ids)
        """Tokens that are no part of the text where they add nothing to it."""
        self._num_prompt_top = prepared.prompt_logprobs
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """None before the first token."""
        self._num_chars = 0
        self._tokens: list[TokenId] = []
        self._entries: list[_Entry] = []
        """Entries of the tokens that were not sent in a chunk."""
        shown = prepared.shown[index]
        self._was_over = shown.is_over
        self._num_shown = shown.num_tokens
        """Tokens with ids and log-probabilities already sent."""
        self._num_shown_chars = shown.num_chars
        self._num_to_skip = shown.num_chars
        """Characters that a resumed stream has sent before, and is to make again."""
        self._tool_use = prepared.tool_use
        self._call_seed = choice.request.request_id
        self._parser = self._new_parser()
        """Parser of a stream's tool calls."""
        self._finish_reason: TextFinish | None = None
        self._stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        if self._prompt_logprobs is None and delta.rounds:
            self._prompt_logprobs = delta.rounds[0].prompt_logprobs
        self._text += delta.text_delta.text
        self._tokens += delta.text_delta.tokens
        if self._wants_origins:
            self._take_origins(delta)
        if self._wants_logprobs:
            self._take_logprobs(delta)
        self._finish_reason = delta.text_delta.finish_reason
        self._stop_reason = delta.text_delta.stop_reason

    @property
    def num_chars(self) -> int:
        return len(self._text)

    def opening(self) -> Json | None:
        if self._is_chat:
            delta = {"role": "assistant", "content": ""}
            return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        if not self._echoed:
            return None
        return {
            "index": self._index,
            "text": self._echoed,
            "logprobs": None,
            "finish_reason": None,
        }

    def prompt_logprobs(self) -> Sequence[object]:
        """Returns the log-probabilities of the prompt's tokens in vLLM's format."""
        return _listed(self._prompt_entries(), self._prompt_entry)

    def _prompt_entry(self, entry: "_Entry") -> Json | None:
        return self._shape.of_prompt(entry, num_top=self._num_prompt_top or 0)

    def _prompt_entries(self) -> "list[_Entry]":
        """Returns the prompt's tokens, the first without a log-probability."""
        decoder, num_chars, num_stripped = StreamDecoder(self._codec), 0, 0
        entries: list[_Entry] = []
        prompt_logprobs = (None, *(self._prompt_logprobs or ()))
        for token, logprobs in zip(self._prompt, prompt_logprobs, strict=True):
            offset = max(num_chars - num_stripped, 0)
            entries.append(_Entry(token, logprobs, min(offset, len(self._echoed))))
            token_text = decoder.feed_one(token)
            if num_chars == 0 and token_text.startswith(" ") and not self._echoed.startswith(" "):
                num_stripped = 1  # some tokenizers put a blank before a text
            num_chars += len(token_text)
        return entries

    @property
    def shown(self) -> Shown:
        return Shown(self._num_shown, self._num_shown_chars, self._finish_reason is not None)

    def unshown(self, delta: Delta) -> Json | None:
        """Returns the visible part of a delta that was not shown before; call after `add`.

        Log-probabilities of text that is held back go into the next chunk; those of an echoed
        prompt, which are not known before the first token, into the first."""
        text = self._unshown_text(delta.text_delta.text)
        if self._was_over or (not text and delta.text_delta.finish_reason is None):
            return None
        message = self._message_delta(text)
        if message is None:
            return None
        fields = self._common_fields(self._num_shown, has_calls=self._has_calls)
        if self._echoes_logprobs and self._num_shown == 0:
            fields["logprobs"] = self._shape.of_text([*self._prompt_entries(), *self._entries])
        self._num_shown = len(self._tokens)
        self._entries.clear()
        self._steps.clear()
        if self._is_chat:
            return {"index": self._index, "delta": message, **fields}
        return {"index": self._index, "text": text, **fields}

    def _message_delta(self, text: str) -> Json | None:
        """Returns what this text adds to a message; None while all of it may become a call."""
        if self._parser is None:
            return {"content": text} if text else {}
        parsed = [self._parser.feed(text)]
        if self._finish_reason is not None:
            parsed.append(self._parser.finish())
        delta: Json = {}
        if content := "".join(chunk.content for chunk in parsed):
            delta["content"] = content
        if calls := [_call_delta(call) for chunk in parsed for call in chunk.calls]:
            delta["tool_calls"] = calls
        return delta if delta or self._finish_reason is not None else None

    @property
    def _has_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def _new_parser(self) -> ToolCallParser | None:
        use = self._tool_use
        if use is None:
            return None
        return ToolCallParser(
            use.form, names=use.names, seed=self._call_seed, max_calls=use.max_calls
        )

    def _unshown_text(self, text: str) -> str:
        num_skipped = min(self._num_to_skip, len(text))
        self._num_to_skip -= num_skipped
        if self._parser is not None and num_skipped:
            self._parser.feed(text[:num_skipped])  # the client has what it makes
        self._num_shown_chars += len(text) - num_skipped
        return text[num_skipped:]

    def whole(self) -> Json:
        if not self._is_chat:
            choice = {"index": self._index, "text": self._text, **self._common_fields(0)}
            if self._echoes_logprobs:
                entries = [*self._prompt_entries(), *self._entries]
                choice["logprobs"] = self._shape.of_text(entries)
            if self._num_prompt_top is not None:
                choice["prompt_logprobs"] = self.prompt_logprobs()
            return choice
        message, has_calls = self._message()
        return {
            "index": self._index,
            "message": message,
            **self._common_fields(0, has_calls=has_calls),
        }

    def _message(self) -> tuple[Json, bool]:
        """Returns the whole message, and whether it has calls."""
        message: Json = {"role": "assistant", "content": self._text, "refusal": None}
        parser = self._new_parser()
        if parser is None:
            return message, False
        parsed = (parser.feed(self._text), parser.finish())
        calls: dict[int, Json] = {}
        for delta in (call for chunk in parsed for call in chunk.calls):
            call = calls.setdefault(delta.index, {"id": delta.id, "type": "function"})
            before = cast("dict[str, str]", call.get("function", {"name": "", "arguments": ""}))
            call["function"] = {
                "name": delta.name or before["name"],
                "arguments": before["arguments"] + delta.arguments,
            }
        content = "".join(chunk.content for chunk in parsed)
        message["content"] = content or (None if calls else "")
        if calls:
            message["tool_calls"] = list(calls.values())
        return message, bool(calls)

    def _common_fields(self, start: int, *, has_calls: bool = False) -> Json:
        finish_reason: str | None = self._finish_reason
        if has_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        fields: Json = {
            "logprobs": self._logprobs(len(self._tokens) - start),
            "finish_reason": finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._wants_ids:
            fields["token_ids"] = self._tokens[start:]
            fields |= {"prompt_token_ids": list(self._prompt)} if start == 0 else {}
        if self._wants_origins:
            fields["token_origins"] = self._origins[start : len(self._tokens)]
            fields["token_texts"] = self._pieces[start:]
            fields["per_step_drafted"] = [num_drafted for num_drafted, _ in self._steps]
            fields["per_step_accepted"] = [num_accepted for _, num_accepted in self._steps]
        return fields

    def _logprobs(self, num_last: int) -> Json | None:
        """Returns the log-probabilities of so many last tokens."""
        if not self._wants_logprobs:
            return None
        entries = self._entries[len(self._entries) - num_last :]
        return self._shape.of_chat(entries) if self._is_chat else self._shape.of_text(entries)

    def _take_origins(self, delta: Delta) -> None:
        self._pieces += delta.text_delta.pieces
        for emission in delta.rounds:
            self._origins += _origins(emission)
            # Before a resumed stream continues, it makes again what was sent.
            if emission.num_drafted > 0 and len(self._tokens) > self._num_shown:
                self._steps.append((emission.num_drafted, emission.num_accepted))

    def _take_logprobs(self, delta: Delta) -> None:
        for token, token_text, logprobs in zip(
            delta.text_delta.tokens, delta.text_delta.pieces, delta.text_delta.logprobs, strict=True
        ):
            offset = len(self._echoed) + self._num_chars
            is_text = bool(token_text) or token not in self._hidden
            self._entries.append(_Entry(token, logprobs, offset, is_text=is_text))
            self._num_chars += len(token_text)


def _call_delta(call: CallDelta) -> Json:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _origins(emission: Emission) -> list[str]:
    """Returns where each token came from. In a tree, the verifier's own token counts as recovered
    unless all of the tree was accepted."""
    if emission.num_drafted == 0:
        return ["target"] * len(emission.tokens)
    num_own = len(emission.tokens) - emission.num_accepted
    own = "bonus" if emission.num_accepted == emission.num_drafted else "recovered"
    return ["accepted"] * emission.num_accepted + [own] * num_own


class _Entry:
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


class _Logprobs:
    """Log-probabilities in the formats of completions and of chats."""

    def __init__(self, codec: TextCodec, *, num_top: int) -> None:
        self._codec = codec
        self._num_top = num_top

    def of_chat(self, entries: Sequence[_Entry]) -> Json:
        return {"content": _listed(entries, self._chat_entry), "refusal": None}

    def of_text(self, entries: Sequence[_Entry]) -> Json:
        return {
            "tokens": _listed(entries, lambda entry: self._text(entry.token)),
            "token_logprobs": _listed(entries, _logprob_of),
            "top_logprobs": _listed(entries, self._text_top),
            "text_offset": _listed(entries, lambda entry: entry.offset),
        }

    def of_prompt(self, entry: _Entry, *, num_top: int) -> Json | None:
        """Returns a token of a prompt and its alternatives by their ids, in vLLM's format; the rank
        of a token that is not among them is not known."""
        if entry.logprobs is None:
            return None
        alternatives: Json = {}
        pairs = [*entry.logprobs.top[:num_top], (entry.token, entry.logprobs.logprob)]
        for rank, (token, logprob) in enumerate(pairs, start=1):
            if str(token) not in alternatives:
                alternatives[str(token)] = {
                    "logprob": _finite(logprob),
                    "rank": rank if rank <= num_top else None,
                    "decoded_token": self._text(token),
                }
        return alternatives

    def _chat_entry(self, entry: _Entry) -> Json:
        assert entry.logprobs is not None, "chats have no echo"
        top = [self._chat_token(token, logprob) for token, logprob in self._top(entry.logprobs)]
        chosen = self._chat_token(entry.token, entry.logprobs.logprob) | {"top_logprobs": top}
        return chosen if entry.is_text else chosen | {"bytes": []}

    def _top(self, logprobs: TokenLogprobs) -> Sequence[tuple[TokenId, float]]:
        return logprobs.top[: self._num_top]

    def _text_top(self, entry: _Entry) -> dict[str, float] | None:
        """Includes the chosen token, so there may be one more than asked for."""
        if entry.logprobs is None:
            return None
        pairs = [*self._top(entry.logprobs), (entry.token, entry.logprobs.logprob)]
        top: dict[str, float] = {}
        for token, logprob in pairs:
            top.setdefault(self._text(token), _finite(logprob))
        return top

    def _chat_token(self, token: TokenId, logprob: float) -> Json:
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


def _listed(entries: Sequence[_Entry], shape: Callable[[_Entry], object]) -> Sequence[object]:
    listed = Listed(entries, shape)
    return listed[:] if len(listed) <= _MAX_MADE else listed


def _logprob_of(entry: _Entry) -> float | None:
    return None if entry.logprobs is None else _finite(entry.logprobs.logprob)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
