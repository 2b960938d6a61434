"""Runs one engine after the other until the limit of tokens or time is reached."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.bench.exact import duration
from eesd_dist.bench.fuzz.cases import Case, save_case
from eesd_dist.bench.fuzz.check import Checked, check
from eesd_dist.bench.fuzz.drawing.cases import GROUP_SIZE, Source
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.rank_processes import RankProcesses
from eesd_dist.bench.fuzz.reference import PlainTexts
from eesd_dist.bench.fuzz.totals import EngineRow, StateFile, Totals

Say = Callable[[str], None]

_EVERY_S = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that end a run."""

    tokens: int | None
    seconds: float | None
    failures: int
    """Number of failing engines."""


class Campaign:
    """Runs the cases of a source in order."""

    def __init__(
        self,
        source: Source,
        shelf: ModelShelf,
        state: StateFile,
        *,
        limits: Limits,
        case_folder: Path,
        say: Say,
    ) -> None:
        self._source = source
        self._shelf = shelf
        self._state = state
        self._limits = limits
        self._case_folder = case_folder
        self._say = say
        self._plain = PlainTexts(shelf)
        self._processes = RankProcesses()
        self._started_s = time.monotonic()
        self._last_line_s = -_EVERY_S
        self.totals = Totals()
        for row in state.rows:
            self.totals.add(row)
        self._tokens_before = self.totals.tokens
        self._num_failing = 0

    def run(self) -> None:
        """Runs cases until a limit is reached."""
        done = {row.number for row in self._state.rows}
        number = 0
        try:
            while not self._is_over():
                if number % GROUP_SIZE == 0:
                    self._plain.forget()
                if number not in done:
                    self._one(number)
                number += 1
        finally:
            self._plain.close()
            self._processes.close()

    def _is_over(self) -> bool:
        limits = self._limits
        spent_s = time.monotonic() - self._started_s
        return (
            (limits.tokens is not None and self.totals.tokens >= limits.tokens)
            or (limits.seconds is not None and spent_s >= limits.seconds)
            or self._num_failing >= limits.failures
        )

    def _one(self, number: int) -> None:
        started_s, plain_before = time.monotonic(), self._plain.num_tokens
        case = self._source.case(number)
        checked = check(case, self._shelf, self._plain, self._processes)
        seconds = time.monotonic() - started_s
        plain_tokens = self._plain.num_tokens - plain_before
        case_file = self._case_file(case) if checked.failures else None
        row = EngineRow.of(
            case,
            checked,
            plain_tokens=plain_tokens,
            seconds=seconds,
            case_file=None if case_file is None else str(case_file),
        )
        self._state.add(row)
        self.totals.add(row)
        if case_file is not None:
            self._report(case, checked, case_file)
        self._progress(case)

    def _progress(self, case: Case) -> None:
        time_s = time.monotonic()
        if time_s - self._last_line_s < _EVERY_S:
            return
        self._last_line_s = time_s
        totals, spent_s = self.totals, time_s - self._started_s
        rate = (totals.tokens - self._tokens_before) / spent_s
        self._say(
            f"{totals.tokens:>9} tokens, {totals.texts} texts, {totals.engines} engines, "
            f"{totals.mismatches} differ, {rate:.0f} tokens/s, {self._left(rate, spent_s)}; "
            f"{case.world.label()}"
        )

    def _left(self, rate: float, spent_s: float) -> str:
        limits = self._limits
        ends = []
        if limits.seconds is not None:
            ends.append(limits.seconds - spent_s)
        if limits.tokens is not None and rate > 0:
            ends.append((limits.tokens - self.totals.tokens) / rate)
        return f"about {duration(max(0.0, min(ends)))} left" if ends else "until stopped"

    def _case_file(self, case: Case) -> Path:
        self._case_folder.mkdir(parents=True, exist_ok=True)
        return self._case_folder / f"fuzz-{case.seed}-{case.number}.json"

    def _report(self, case: Case, checked: Checked, file: Path) -> None:
        """Writes the case, and prints the failure and the command that repeats it."""
        self._num_failing += 1
        self._say(f"FAILED: seed {case.seed}, engine {case.number}, {case.world.label()}")
        for failure in checked.failures[:5]:
            self._say(f"  {failure.entry}: {failure.what.rstrip()}")
        save_case(case, file)
        self._say(
            f"  see it again: {_program()} --case {file}; in the repository, "
            f"`make fuzz-reduce CASE={file}` makes it smaller"
        )


def _program() -> str:
    is_module = sys.argv[0].endswith("__main__.py")
    return "python -m eesd_dist.bench.fuzz" if is_module else "eesd bench exact"
