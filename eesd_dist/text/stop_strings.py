"""Detection of stop strings in a text that arrives in pieces.

Works on pieces of text, one per token. Text that could still become a stop string is held back. The
end is decided piece by piece, so it does not depend on how many pieces arrive at a time: of the
stop strings that a piece completes the one that ends first wins, and the longer one when two end at
the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of pushing some pieces."""

    text: str
    """Text that may be shown now."""
    num_tokens: int
    """Number of pieces that belong to the text; fewer than all only after a match."""
    matched: str | None = None
    """The stop string that ended the text."""


class StopStrings:
    """Looks for stop strings in one text.

    Knuth, Morris and Pratt's automaton for each stop string: time is linear in the text, whatever
    the stop strings are.
    """

    def __init__(
        self, stops: Sequence[str], *, include_in_output: bool = False, min_tokens: int = 0
    ) -> None:
        """`min_tokens`: number of first tokens that cannot be part of a match."""
        assert all(stops), "an empty stop string would end every text"
        self._stops = tuple(_Progress(stop) for stop in stops)
        self._include_in_output = include_in_output
        self._num_exempt = min_tokens
        self._held = ""

    def push(self, token_texts: Sequence[str]) -> Checked:
        leaving: list[str] = []
        for i, token_text in enumerate(token_texts):
            text, matched = self._push_one(token_text)
            leaving.append(text)
            if matched is not None:
                return Checked(text="".join(leaving), num_tokens=i + 1, matched=matched)
        return Checked(text="".join(leaving), num_tokens=len(token_texts))

    def finish(self) -> str:
        """Returns the text held back, when the text ends for another reason."""
        suffix, self._held = self._held, ""
        return suffix

    def _push_one(self, token_text: str) -> tuple[str, str | None]:
        if self._num_exempt > 0:
            self._num_exempt -= 1
            return token_text, None
        if not self._stops or not token_text:
            return token_text, None
        text = self._held + token_text
        match = self._match(token_text)
        if match is None:
            return self._hold_back(text), None
        end, stop = len(self._held) + match[0], match[1]
        self._held = ""
        return text[: end if self._include_in_output else end - len(stop)], stop

    def _match(self, token_text: str) -> tuple[int, str] | None:
        """Returns where in the piece a stop string ends, and which one; None if none does."""
        for end, char in enumerate(token_text, start=1):
            complete = [progress.stop for progress in self._stops if progress.advance(char)]
            if complete:
                return end, max(complete, key=len)
        return None

    def _hold_back(self, text: str) -> str:
        """Holds back the longest end of the text that begins a stop string; returns the rest."""
        cut = len(text) - max(progress.length for progress in self._stops)
        self._held = text[cut:]
        return text[:cut]


class _Progress:
    """Progress in one stop string: how much of it the text ends with."""

    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Characters: the longest beginning of the stop string that the text ends with."""
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """Adds a character; returns whether the text ends with the whole stop string then."""
        length, stop = self.length, self.stop
        while length and stop[length] != char:
            length = self._borders[length - 1]
        self.length = length + 1 if stop[length] == char else 0
        return self.length == len(stop)


def _borders(stop: str) -> list[int]:
    """Returns, for each beginning of the string, the length of its longest proper beginning that is
    also its end."""
    borders = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[length] != stop[at]:
            length = borders[length - 1]
        length += stop[length] == stop[at]
        borders[at] = length
    return borders
