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
    num_pieces: int
    """How many of the pieces belong to the text; fewer than all only after a match."""
    matched: str | None = None
    """The stop string that ended the text."""


class StopStrings:
    """Looks for stop strings in one text."""

    def __init__(
        self, stops: Sequence[str], *, include_in_output: bool = False, min_pieces: int = 0
    ) -> None:
        """`min_pieces`: number of first pieces that cannot be part of a match."""
        assert all(stops), "an empty stop string would end every text"
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._num_exempt = min_pieces
        self._held = ""

    def push(self, pieces: Sequence[str]) -> Checked:
        leaving: list[str] = []
        for i, piece in enumerate(pieces):
            text, matched = self._push_one(piece)
            leaving.append(text)
            if matched is not None:
                return Checked(text="".join(leaving), num_pieces=i + 1, matched=matched)
        return Checked(text="".join(leaving), num_pieces=len(pieces))

    def finish(self) -> str:
        """Returns the text held back, when the text ends for another reason."""
        rest, self._held = self._held, ""
        return rest

    def _push_one(self, piece: str) -> tuple[str, str | None]:
        if self._num_exempt > 0:
            self._num_exempt -= 1
            return piece, None
        if not self._stops or not piece:
            return piece, None
        text = self._held + piece
        found = min(self._matches(text), default=None)
        if found is None:
            return self._hold_back(text), None
        end, start, stop = found
        self._held = ""
        return text[: end if self._include_in_output else start], stop

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        starts = ((text.find(stop), stop) for stop in self._stops)
        return [(start + len(stop), start, stop) for start, stop in starts if start >= 0]

    def _hold_back(self, text: str) -> str:
        """Holds back the longest end of the text that begins a stop string; returns the rest."""
        num_held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
