"""Progress of a step: lines in a log file, a bar on a terminal."""

import io
import sys
import time

import pytest

from eesd_dist import progress
from eesd_dist.progress import progress_bar


def lines_of(num_updates: int) -> list[str]:
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with progress_bar(title="train", unit="step", total=num_updates) as bar:
            for _ in range(num_updates):
                bar.update()
                time.sleep(0.01)
    text = stream.getvalue()
    assert "\r" not in text
    assert text.endswith("\n")
    return text.splitlines()


def test_a_log_file_gets_a_line_a_minute_with_the_first_and_the_last_state() -> None:
    assert progress._LINE_S == 60.0
    first, last = lines_of(20)
    assert first.startswith("train:   0%")
    assert last.startswith("train: 100%")
    assert "20/20" in last


def test_states_between_them_are_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_S", 0.05)
    lines = lines_of(40)
    assert 4 <= len(lines) <= 12
    assert all(line.startswith("train:") for line in lines)


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress_bar(range(3), title="speed", unit="text")) == [0, 1, 2]
    assert terminal.getvalue().startswith("\rspeed:")
