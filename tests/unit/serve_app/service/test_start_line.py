"""What `eesd serve` draws on a terminal while it starts, and what a file or a pipe gets."""

import io
import logging
import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

import pytest

from eesd_dist.routing.directory import PipelineId, PipelineReport, RankLoad, StartReport
from serve_app.service.start_line import Shown, shown_of, start_line

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Terminal:
    """The master's side of a pseudo terminal."""

    master: int
    stream: TextIO
    written: str = field(default="")

    def read_until(self, text: str) -> str:
        """Returns all that was written so far, with its control sequences."""
        deadline_s = time.monotonic() + 10.0
        while text not in CONTROL.sub("", self.written):
            assert time.monotonic() < deadline_s, (text, self.written)
            if select.select([self.master], [], [], 0.1)[0]:
                self.written += os.read(self.master, 65536).decode()
        return self.written


@contextmanager
def _terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w") as stream:
            yield Terminal(master, stream)
    finally:
        os.close(master)


def test_a_terminal_has_one_line_that_is_drawn_again_with_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    with _terminal(monkeypatch) as terminal:
        with start_line(terminal.stream, say=lines.append) as line:
            assert line.is_drawn
            line.stage("starting Ray")
            terminal.read_until("starting Ray")
            terminal.read_until("1 s")
            line.show(Shown(stage="loading weights", num_done=1, num_all=4, detail="a 25 %"))
            drawn = terminal.read_until("a 25 %")
            assert "\n" not in drawn
            assert "\r\x1b[2K" in drawn, "the line is erased and drawn again"
            line.say("[bold] starting tiny (logs: /a/b) ...")
            assert "[bold] starting tiny (logs: /a/b) ...\r\n" in terminal.read_until("/a/b) ...")
            line.end()
            line.end()
            line.say("ready after 3 s")
        before = terminal.written
        terminal.stream.write("end")
        terminal.stream.flush()
        after = terminal.read_until("end").removeprefix(before)
        assert "loading weights" not in CONTROL.sub("", after.rpartition("\x1b[2K")[2])
    assert lines == ["ready after 3 s"], "the rest went above the line"


def test_the_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with _terminal(monkeypatch) as terminal:
        monkeypatch.setenv("COLUMNS", "60")
        with start_line(terminal.stream, say=print) as line:
            line.show(Shown(stage="loading weights", detail=", ".join(["verify rank 0 1 %"] * 20)))
            drawn = CONTROL.sub("", terminal.read_until("verify"))
            line.end()
        assert all(len(text) <= 60 for text in re.split(r"[\r\n]", drawn))


def test_warnings_do_not_tear_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with _terminal(monkeypatch) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal.stream)
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger().addHandler(handler)
        try:
            with start_line(terminal.stream, say=print) as line:
                line.stage("starting Ray")
                terminal.read_until("starting Ray")
                logging.getLogger("a").warning("no kernels")
                drawn = terminal.read_until("no kernels")
                assert re.search(r"\r\x1b\[2K(\x1b\[[0-9;]*m)*no kernels", drawn), drawn
            assert handler.stream is terminal.stream
        finally:
            logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_file_and_a_dumb_terminal_get_whole_lines_alone(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with _terminal(monkeypatch) as terminal:
        monkeypatch.setenv("TERM", term)
        stream: TextIO = io.StringIO() if term == "xterm" else terminal.stream
        with start_line(stream, say=lines.append) as line:
            assert not line.is_drawn
            line.stage("starting Ray")
            line.say("starting tiny ...")
            line.show(Shown(stage="loading weights", num_done=1, num_all=2))
        assert not isinstance(stream, io.StringIO) or stream.getvalue() == ""
    assert lines == ["starting tiny ..."]


def test_where_the_logs_of_actors_are_shown_there_is_no_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        _terminal(monkeypatch) as terminal,
        start_line(terminal.stream, say=print, shows_progress=False) as line,
    ):
        assert not line.is_drawn


def _report(name: str, start: StartReport | None, *, is_ready: bool = False) -> PipelineReport:
    return PipelineReport(
        pipeline_id=PipelineId(name), leader="", address=None, is_ready=is_ready, start=start
    )


def _start(*loads: tuple[int, int], num_workers: int = 2) -> StartReport:
    return StartReport(
        num_workers=num_workers,
        num_slots=2,
        loads=tuple(
            RankLoad(rank=name, bytes_done=done, bytes_total=total)
            for name, (done, total) in zip(("drafting actor", "verify rank 0"), loads, strict=False)
        ),
    )


def test_each_stage_of_a_start_has_its_words() -> None:
    def shown(start: StartReport | None, *, compiles: bool = False) -> Shown:
        return shown_of([_report("p", start)], compiles=compiles)

    assert shown_of([], compiles=False) == Shown(stage="placing workers")
    assert shown(None) == Shown(stage="placing workers")
    placing = StartReport(num_workers=0, num_slots=0)
    assert shown(placing, compiles=True) == Shown(
        stage="placing workers", detail="kernels are being compiled"
    )
    assert shown(_start(num_workers=1)) == Shown(stage="starting workers, 1 of 2")
    assert shown(_start()) == Shown(stage="reading the model")
    assert shown(_start(), compiles=True) == Shown(stage="compiling kernels")
    loaded = shown(_start((10**9, 10**9), (3 * 10**9, 3 * 10**9)))
    assert loaded.stage == "weights loaded, preparing the first round"
    assert (loaded.num_done, loaded.num_all) == (4 * 10**9, 4 * 10**9)
    assert loaded.detail == "4.0 GB of 4.0 GB"


def test_the_bar_moves_when_every_rank_has_said_how_much_it_loads() -> None:
    single = shown_of([_report("p", _start((10**9, 2 * 10**9)))], compiles=True)
    assert (single.stage, single.num_done, single.num_all) == ("loading weights", 0, None)
    assert single.detail == "kernels are being compiled, 1.0 GB of 2.0 GB, drafting actor 50 %"
    both = shown_of([_report("p", _start((2 * 10**9, 2 * 10**9), (0, 6 * 10**9)))], compiles=False)
    assert (both.num_done, both.num_all) == (2 * 10**9, 8 * 10**9)
    assert both.detail == "2.0 GB of 8.0 GB, verify rank 0 0 %"


def test_of_several_pipelines_the_ready_ones_are_counted() -> None:
    reports = [_report("a", None, is_ready=True), _report("b", _start((1, 2), (1, 2)))]
    shown = shown_of(reports, compiles=False)
    assert shown.stage == "1 of 2 pipelines ready, loading weights"
    assert (shown.num_done, shown.num_all) == (2, 4)
    waiting = shown_of([*reports, _report("c", None)], compiles=False)
    assert waiting.stage == "1 of 3 pipelines ready, loading weights"
    assert waiting.num_all is None, "the third one will load too"
