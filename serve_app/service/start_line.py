"""A line of a terminal, drawn again and again: what a service that starts is doing, and since when.

Where the output is no terminal there is no such line: files and pipes get whole lines only, as
without it. It shows what the pipelines report and estimates nothing: the bar moves only when every
rank has said how much it has to load.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # rich takes long to import; a service without a terminal never needs it
    from eesd_dist.routing.directory import PipelineReport, RankLoad, StartReport

_BAR_CHARS = 24
_NO_CURSOR = ("", "dumb", "unknown")
"""Values of TERM for terminals that cannot draw a line again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Contents of the line besides the time."""

    stage: str
    num_done: int = 0
    num_all: int | None = None
    """Bytes; None: their number is not known, or nothing is loaded."""
    detail: str = ""


class StartLine:
    """The line where there is none: what is said is said as always."""

    is_drawn = False

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def say(self, text: str) -> None:
        """Prints whole lines; the line stays below them."""
        self._say(text)

    def show(self, shown: Shown) -> None:
        del shown

    def stage(self, name: str) -> None:
        self.show(Shown(stage=name))

    def end(self) -> None:
        """Removes the line. May be called again."""


class TerminalLine(StartLine):
    """The line of a terminal."""

    is_drawn = True

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        super().__init__(say)
        self._console = Console(file=stream)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR_CHARS),
            TextColumn("{task.elapsed:.0f} s", markup=False),
            TextColumn("{task.fields[detail]}", markup=False),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            # Only where it is this terminal: the messages of a redirected one belong in its file.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("starting", total=None, detail="")
        before = sys.stderr
        self._progress.start()
        self._handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is before
        ]
        self._stderr = before
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def say(self, text: str) -> None:
        if self._progress.live.is_started:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            super().say(text)

    def show(self, shown: Shown) -> None:
        self._progress.update(
            self._task,
            description=shown.stage,
            completed=shown.num_done,
            detail=shown.detail,
        )
        # `update` takes None for "as before".
        self._progress.tasks[0].total = shown.num_all

    def end(self) -> None:
        self._progress.stop()
        for handler in self._handlers:
            handler.setStream(self._stderr)
        self._handlers = []


@contextmanager
def start_line(
    stream: TextIO, *, say: Callable[[str], None], shows_progress: bool = True
) -> Iterator[StartLine]:
    """Yields the line of this stream; it ends with the block, if not before."""
    is_drawn = (
        shows_progress and stream.isatty() and os.environ.get("TERM", "dumb") not in _NO_CURSOR
    )
    line = TerminalLine(stream, say) if is_drawn else StartLine(say)
    try:
        yield line
    finally:
        line.end()


def shown_of(reports: "Sequence[PipelineReport]", *, compiles: bool) -> Shown:
    """Returns what starting pipelines do. `compiles`: kernels are being compiled here."""
    coming = [report for report in reports if not report.is_ready]
    starts = [report.start for report in coming if report.start is not None]
    loads = [load for start in starts for load in start.loads]
    num_slots = sum(start.num_slots for start in starts)
    num_workers = sum(start.num_workers for start in starts)
    has_totals = len(starts) == len(coming) and all(map(_has_total, starts))
    num_ready = len(reports) - len(coming)
    before = f"{num_ready} of {len(reports)} pipelines ready, " if len(reports) > 1 else ""
    kernels = "kernels are being compiled" if compiles else ""
    if not num_slots:
        return Shown(stage=f"{before}placing workers", detail=kernels)
    if not loads and num_workers < num_slots:
        stage = f"{before}starting workers, {num_workers} of {num_slots}"
        return Shown(stage=stage, detail=kernels)
    if not loads:
        stage = "compiling kernels" if compiles else "reading the model"
        return Shown(stage=before + stage)
    done, total = (sum(load.bytes_done for load in loads), sum(load.bytes_total for load in loads))
    load_texts = [_load_text(load) for load in loads if load.bytes_done < load.bytes_total]
    is_over = has_totals and not load_texts
    stage = "weights loaded, preparing the first round" if is_over else "loading weights"
    return Shown(
        stage=before + stage,
        num_done=done if has_totals else 0,
        num_all=total if has_totals else None,
        detail=", ".join(filter(None, [kernels, _bytes(done, total), *load_texts])),
    )


def _has_total(start: "StartReport") -> bool:
    """Returns whether every rank has said how much it loads."""
    return 0 < start.num_slots == len(start.loads)


def _load_text(load: "RankLoad") -> str:
    return f"{load.rank} {load.bytes_done / load.bytes_total:.0%}".replace("%", " %")


def _bytes(done: int, total: int) -> str:
    from rich.filesize import decimal

    return f"{decimal(done)} of {decimal(total)}"
