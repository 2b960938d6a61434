"""Finds tool calls in a growing text.

What is known after a text depends on the text alone, not on the pieces in which it came: a stream
and a whole answer have the same calls, and a resumed stream goes on where it was.
"""

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from serve_app.openai.tools.formats import ToolFormat

_SPECIAL = re.compile(r'["\\]')
"""Characters that end a run inside a JSON string."""
_ARGUMENTS = ("arguments", "parameters")
"""Keys of arguments: models write the one of another format, too."""
_MOST_HELD = 128
"""Characters of blanks and a beginning mark."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The addition of a piece of text to one call."""

    index: int
    """Index of the call, from 0."""
    id: str | None
    """Id and name come once, first."""
    name: str | None
    arguments: str
    """A piece of the JSON text of its arguments."""


@dataclass(slots=True)
class _Growing:
    """A `CallDelta` that is being made."""

    index: int
    id: str | None
    name: str | None
    fragments: list[str]


class Parsed(NamedTuple):
    content: str
    calls: list[CallDelta]


class ToolCallParser:
    """Reads one answer character by character.

    Text that may be the beginning of a mark is held back, with the blanks before it. What turns out
    not to be a call is content, mark included, unless its name was known before.
    """

    def __init__(
        self, form: ToolFormat, *, names: Collection[str], seed: str, max_calls: int | None = None
    ) -> None:
        """`names`: the tools that may be called without a mark. `seed`: what the ids of the calls
        depend on. `max_calls`: later ones are left out."""
        self._form = form
        self._names = frozenset(names)
        self._seed = seed
        self._max_calls = max_calls
        self._state: Literal["text", "between", "call", "closing"] = "text"
        self._is_start = True
        """True while nothing but blanks has come."""
        self._held = ""
        """Text that may become a mark."""
        self._raw: list[str] = []
        """Text since the mark, or since the last call after it, that is no call so far."""
        self._is_marked = False
        self._call = _CallReader()
        self._num_returned = 0
        """Pieces of the call's arguments that were returned."""
        self._num_calls = 0
        """Number of calls with a name."""
        self._has_name = False
        """True if the call that is being read, or was read last, has a name."""
        self._content: list[str] = []
        self._calls: list[_Growing] = []

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def feed(self, text: str) -> Parsed:
        """Returns what this text adds."""
        at = 0
        while at < len(text):
            size = self._take_run(text, at)
            if size == 0:
                self._take(text[at])
            at += max(size, 1)
        return self._take_parsed()

    def _take_run(self, text: str, at: int) -> int:
        """Takes what changes nothing but what was read, as one piece: of a string, or of content.
        Returns its length."""
        if self._state == "call" and self._call.is_in_text:
            special = _SPECIAL.search(text, at)
            run = text[at : len(text) if special is None else special.start()]
            if run:
                self._take_call(run)
            return len(run)
        if self._state != "text" or self._held.strip() or self._may_begin_without_mark:
            return 0
        end = text.find(self._form.marker[0], at)
        run = text[at : len(text) if end < 0 else end].rstrip()
        if run:
            self._content.append(self._held + run)
            self._held, self._is_start = "", False
        return len(run)

    @property
    def _may_begin_without_mark(self) -> bool:
        return self._is_start and not self._form.needs_marker

    def finish(self) -> Parsed:
        """Returns what was held back, at the end of the text."""
        if self._state != "closing" and (self._held.strip() or not self._num_calls):
            self._content.append(self._held)
        self._give_up()
        return self._take_parsed()

    def _take_parsed(self) -> Parsed:
        calls = [
            CallDelta(call.index, call.id, call.name, "".join(call.fragments))
            for call in self._calls
        ]
        parsed = Parsed("".join(self._content), calls)
        self._content, self._calls = [], []
        return parsed

    def _take(self, char: str) -> None:
        if self._state == "text":
            self._take_text(char)
        elif self._state == "between":
            self._take_between(char)
        elif self._state == "call":
            self._take_call(char)
        else:
            self._take_closing(char)

    def _take_text(self, char: str) -> None:
        marker = self._form.marker
        if char == "{" and self._may_begin_without_mark:
            self._begin_call(char, is_marked=False)
            return
        self._is_start = self._is_start and char.isspace()
        self._held += char
        while not marker.startswith(self._held.lstrip()) or len(self._held) > _MOST_HELD:
            self._content.append(self._held[0])
            self._held = self._held[1:]
        if self._held.lstrip() == marker:
            self._raw, self._held = [self._held], ""
            self._state, self._is_marked, self._has_name = "between", True, False

    def _take_between(self, char: str) -> None:
        if char == "{":
            self._begin_call(char, is_marked=self._is_marked)
        elif char.isspace() or char in "[,;":
            if not self._has_name:  # else it is what separates two calls
                self._raw.append(char)
        else:  # the end of the calls, or no calls at all
            self._give_up()
            if char != "]":
                self._take_text(char)

    def _begin_call(self, char: str, *, is_marked: bool) -> None:
        self._raw.append(self._held)
        self._held = ""
        self._state, self._is_start, self._is_marked = "call", False, is_marked
        self._call, self._num_returned, self._has_name = _CallReader(), 0, False
        self._take_call(char)

    def _take_call(self, text: str) -> None:
        """`text`: one character, or a run inside a string."""
        call = self._call
        call.feed(text)
        if not self._has_name:
            self._raw.append(text)
            is_foreign = not self._is_marked and call.name not in self._names
            if call.has_failed or (call.name is not None and is_foreign):
                self._give_up()
                return
            if call.name is None:
                if call.is_over:
                    self._give_up()
                return
            self._has_name = True
            self._raw.clear()
            self._num_calls += 1
            self._add(id=self._new_id(), name=call.name, fragments=[])
        if len(call.arguments) > self._num_returned:
            self._add(fragments=call.arguments[self._num_returned :])
            self._num_returned = len(call.arguments)
        if call.is_over:
            if self._num_returned == 0:
                self._add(fragments=["{}"])
            self._state = "between" if self._form.is_list else "closing"

    def _give_up(self) -> None:
        """Takes what was read since the mark, and is no call, as content."""
        self._content += self._raw
        self._raw.clear()
        self._held, self._state = "", "text"

    def _take_closing(self, char: str) -> None:
        """Skips the mark that closes a call."""
        closing = self._form.closing.strip()
        self._held = (self._held + char).lstrip()
        if self._held == closing:
            self._held, self._state = "", "text"
        elif not closing.startswith(self._held):
            text, self._held, self._state = self._held, "", "text"
            for held_char in text:
                self._take_text(held_char)

    def _add(self, *, fragments: list[str], id: str | None = None, name: str | None = None) -> None:
        at = self._num_calls - 1
        if self._max_calls is not None and at >= self._max_calls:
            return
        if id is None and self._calls and self._calls[-1].index == at:
            self._calls[-1].fragments += fragments
        else:
            self._calls.append(_Growing(at, id, name, list(fragments)))

    def _new_id(self) -> str:
        digest = hashlib.sha256(f"{self._seed} call {self._num_calls}".encode()).hexdigest()
        short = self._form.id_length < len("call_") * 2
        return digest[: self._form.id_length] if short else f"call_{digest[: self._form.id_length]}"


class _CallReader:
    """Reads one JSON object: its name, and the text of its arguments as far as it has come."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None
        """None while a key is read."""
        self._raw: list[str] = []
        """Text of the key, or of a value that is not an object of arguments."""
        self._streams: bool | None = None
        """True if the value is an object of arguments; None before its first character."""
        self.name: str | None = None
        self.arguments: list[str] = []
        """Pieces of their text, only added to."""
        self.is_over = False
        self._has_arguments = False
        """True once a value of arguments is over; another one is left out."""
        self.has_failed = False

    @property
    def is_in_text(self) -> bool:
        """True while characters other than quotes and backslashes change nothing."""
        return self._in_string and not self._is_escaped

    def feed(self, char: str) -> None:
        """Reads a character, or a run while `is_in_text`."""
        depth, was_in_string = self._depth, self._in_string
        self._advance(char)
        if depth == 0:  # the opening brace
            return
        is_top = depth == 1 and not was_in_string
        if is_top and self._key is None and char == ":":
            self._end_key()
        elif is_top and char in ",}":
            self._end_value()
            self.is_over = char == "}"
        elif is_top and char == "]":
            self.has_failed = True
        else:
            self._add(char, depth=depth)

    def _advance(self, char: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _add(self, char: str, *, depth: int) -> None:
        if self._key not in _ARGUMENTS or self._has_arguments:
            self._raw.append(char)
            return
        if self._streams is None and not char.isspace():
            self._streams = char == "{"
        if self._streams is None:
            return
        if not self._streams:
            self._raw.append(char)
        elif depth > 1 or char == "{":
            self.arguments.append(char)

    def _end_key(self) -> None:
        key = self._parsed()
        self.has_failed = self.has_failed or not isinstance(key, str)
        self._key = key if isinstance(key, str) else ""

    def _end_value(self) -> None:
        is_empty = self._key is None and not "".join(self._raw).strip()
        if self._key is None and not is_empty:
            self.has_failed = True
        elif self._key == "name":
            name = self._parsed()
            self.has_failed = self.has_failed or not isinstance(name, str)
            self.name = name if isinstance(name, str) and self.name is None else self.name
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            raw, value = "".join(self._raw).strip(), self._parsed()
            if not self._streams and raw != "null":
                self.arguments.append(value if isinstance(value, str) else raw)
        self._key, self._streams = None, None
        self._raw.clear()

    def _parsed(self) -> object:
        """Returns the value that was read; None where it is no JSON."""
        raw = "".join(self._raw)
        self._raw.clear()
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return None
