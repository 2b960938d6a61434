"""Progress of long work: a bar on a terminal, and in a log file a line a minute."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

_LINE_S = 60.0


class _Lines:
    """A stream on which every state of a bar is a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if state := text.strip():
            self._stream.write(state + "\n")

    def flush(self) -> None:
        self._stream.flush()


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    unit: str,
    total: int | None = None,
    initial: int = 0,
    title: str | None = None,
) -> "tqdm[Any]":
    """Returns a bar on stderr, over `items` or for a number of updates."""
    on_terminal = sys.stderr.isatty()
    return tqdm(
        items,
        desc=title,
        total=total,
        initial=initial,
        unit=unit,
        file=sys.stderr if on_terminal else _Lines(sys.stderr),
        mininterval=0.1 if on_terminal else _LINE_S,
        maxinterval=10.0 if on_terminal else _LINE_S,
    )
