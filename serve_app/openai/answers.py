"""Completion, chat and chunk objects, as OpenAI's API sends them.

Every key that OpenAI sends is there, null included.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

from eesd_dist.text import TextCodec, TextFinish
from eesd_dist.types import Emission, TokenId
from serve_app.openai.event_ids import Shown
from serve_app.openai.generation import ChoiceTally, Delta
from serve_app.openai.logprobs import ChoiceLogprobs
from serve_app.openai.prepared import Prepared
from serve_app.openai.request_metrics import metrics_of, num_cached_tokens
from serve_app.openai.tools import CallDelta, ToolCallParser, ToolUse

Json = dict[str, object]


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
        """Returns the answer; its log-probabilities may be a `LazyList`."""
        is_chat = self._prepared.kind == "chat"
        prompt_logprobs: Json = {}
        if is_chat and self._prepared.options.prompt_logprobs is not None:
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
        return chunk | {"usage": None} if self._prepared.options.include_usage else chunk

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
        self._prompt_ids = (
            prepared.prompts[choice.prompt_index] if prepared.options.return_token_ids else None
        )
        self._origins = _TokenOrigins() if prepared.options.return_token_origins else None
        self._logprobs = ChoiceLogprobs(prepared, choice, codec=codec)
        self._has_prompt_logprobs = prepared.options.prompt_logprobs is not None
        self._message = _Message(prepared.tool_use, seed=choice.request.request_id)
        self._echoed = prepared.echoed[choice.prompt_index]
        self._text = self._echoed
        self._tokens: list[TokenId] = []
        shown = prepared.shown[index]
        self._was_over = shown.is_over
        self._num_shown = shown.num_tokens
        """Tokens with ids and log-probabilities already sent."""
        self._num_shown_chars = shown.num_chars
        self._num_to_skip = shown.num_chars
        """Characters that a resumed stream has sent before, and is to make again."""
        self._finish_reason: TextFinish | None = None
        self._stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self._text += delta.text_delta.text
        self._tokens += delta.text_delta.tokens
        if self._origins is not None:
            # Before a resumed stream continues, it makes again what was sent.
            self._origins.add(delta, num_shown=self._num_shown)
        self._logprobs.add(delta)
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
        return self._logprobs.of_prompt()

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
        message = self._message.delta(text, is_over=self._finish_reason is not None)
        if message is None:
            return None
        fields = self._common_fields(self._num_shown, has_calls=self._message.has_calls)
        if self._logprobs.has_echo and self._num_shown == 0:
            fields["logprobs"] = self._logprobs.with_prompt()
        self._num_shown = len(self._tokens)
        self._logprobs.clear()
        if self._origins is not None:
            self._origins.clear()
        if self._is_chat:
            return {"index": self._index, "delta": message, **fields}
        return {"index": self._index, "text": text, **fields}

    def _unshown_text(self, text: str) -> str:
        num_skipped = min(self._num_to_skip, len(text))
        self._num_to_skip -= num_skipped
        if num_skipped:
            self._message.skip(text[:num_skipped])
        self._num_shown_chars += len(text) - num_skipped
        return text[num_skipped:]

    def whole(self) -> Json:
        if not self._is_chat:
            choice = {"index": self._index, "text": self._text, **self._common_fields(0)}
            if self._logprobs.has_echo:
                choice["logprobs"] = self._logprobs.with_prompt()
            if self._has_prompt_logprobs:
                choice["prompt_logprobs"] = self.prompt_logprobs()
            return choice
        message, has_calls = self._message.whole(self._text)
        return {
            "index": self._index,
            "message": message,
            **self._common_fields(0, has_calls=has_calls),
        }

    def _common_fields(self, start: int, *, has_calls: bool = False) -> Json:
        finish_reason: str | None = self._finish_reason
        if has_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        fields: Json = {
            "logprobs": self._logprobs.of_last(len(self._tokens) - start),
            "finish_reason": finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._prompt_ids is not None:
            fields["token_ids"] = self._tokens[start:]
            fields |= {"prompt_token_ids": list(self._prompt_ids)} if start == 0 else {}
        if self._origins is not None:
            fields |= self._origins.fields(start, end=len(self._tokens))
        return fields


class _Message:
    """The message of a chat: its content, and the calls that a text with tools becomes."""

    def __init__(self, use: ToolUse | None, *, seed: str) -> None:
        """`use` None: no tool may be called. `seed`: of the ids of calls."""
        self._use = use
        self._seed = seed
        self._parser = self._new_parser()
        """Parser of a stream's tool calls."""

    @property
    def has_calls(self) -> bool:
        """True if the deltas so far have calls."""
        return self._parser is not None and self._parser.num_calls > 0

    def skip(self, text: str) -> None:
        """Reads text of which the client has what becomes of it."""
        if self._parser is not None:
            self._parser.feed(text)

    def delta(self, text: str, *, is_over: bool) -> Json | None:
        """Returns what this text adds to a message; None while all of it may become a call."""
        if self._parser is None:
            return {"content": text} if text else {}
        parsed = [self._parser.feed(text)]
        if is_over:
            parsed.append(self._parser.finish())
        delta: Json = {}
        if content := "".join(chunk.content for chunk in parsed):
            delta["content"] = content
        if calls := [_call_delta(call) for chunk in parsed for call in chunk.calls]:
            delta["tool_calls"] = calls
        return delta if delta or is_over else None

    def whole(self, text: str) -> tuple[Json, bool]:
        """Returns the message of a whole text, and whether it has calls."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        parser = self._new_parser()
        if parser is None:
            return message, False
        parsed = (parser.feed(text), parser.finish())
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

    def _new_parser(self) -> ToolCallParser | None:
        use = self._use
        if use is None:
            return None
        return ToolCallParser(use.form, names=use.names, seed=self._seed, max_calls=use.max_calls)


class _TokenOrigins:
    """Origins and texts of the tokens of a choice, and its drafts that were not sent."""

    def __init__(self) -> None:
        self._origins: list[str] = []
        self._texts: list[str] = []
        self._drafts: list[tuple[int, int]] = []
        """Drafted and accepted tokens of the rounds with a draft that were not sent in a chunk."""

    def add(self, delta: Delta, *, num_shown: int) -> None:
        """Adds the tokens of a delta. `num_shown`: tokens that the client has been sent."""
        self._texts += delta.text_delta.pieces
        for emission in delta.rounds:
            self._origins += _origins(emission)
            if len(self._origins) > num_shown and emission.num_drafted > 0:
                self._drafts.append((emission.num_drafted, emission.num_accepted))

    def fields(self, start: int, *, end: int) -> Json:
        return {
            "token_origins": self._origins[start:end],
            "token_texts": self._texts[start:],
            "per_step_drafted": [num_drafted for num_drafted, _ in self._drafts],
            "per_step_accepted": [num_accepted for _, num_accepted in self._drafts],
        }

    def clear(self) -> None:
        """Forgets the drafts that were sent."""
        self._drafts.clear()


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
