"""Rows that were in an engine when its process died: they are isolated, and the one that is to
blame is named.

A process that dies may have been killed by one of its rows, or by chance. Its rows run again with
no others than those of their batch; if the process dies again, each runs alone; a row that was
alone in the process twice when it died is not run any more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DEATHS_ALONE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Deaths of processes during a row."""

    num_deaths: int = 0
    num_single_deaths: int = 0
    """Deaths with no other row in the process."""

    @property
    def runs_alone(self) -> bool:
        return self.num_deaths > 1

    @property
    def is_poison(self) -> bool:
        return self.num_single_deaths >= MAX_DEATHS_ALONE


class Quarantine:
    """Counts deaths by row, for all engines of a job; an actor of its own."""

    def __init__(self) -> None:
        self._running: dict[str, Counter[str]] = {}
        """The rows in each engine."""
        self._deaths: Counter[str] = Counter()
        self._deaths_alone: Counter[str] = Counter()

    def restarted(self, engine: str) -> int:
        """Counts the death of an engine's process, if there was one before; returns the number of
        its rows."""
        rows = self._running.pop(engine, Counter())
        self._deaths.update(rows.keys())
        if len(rows) == 1:
            self._deaths_alone.update(rows.keys())
        return len(rows)

    def suspicions(self, rows: Sequence[str]) -> list[Suspicion]:
        return [
            Suspicion(num_deaths=self._deaths[row], num_single_deaths=self._deaths_alone[row])
            for row in rows
        ]

    def begin(self, engine: str, rows: Sequence[str]) -> None:
        """Notes that rows are in an engine from now on."""
        self._running.setdefault(engine, Counter()).update(rows)

    def end(self, engine: str, rows: Sequence[str]) -> None:
        """Notes that rows have left an engine with their answers: they are to blame for nothing."""
        running = self._running.get(engine, Counter())
        running.subtract(rows)
        for row in rows:
            if running[row] <= 0:
                del running[row]
            del self._deaths[row], self._deaths_alone[row]
