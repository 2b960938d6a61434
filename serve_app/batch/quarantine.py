"""Rows that were in an engine when its process died: they are isolated, and the one that is to
blame is named.

A process that dies may have been killed by one of its rows, or by chance. Its rows run again with
no others than those of their group; if the process dies again, each runs alone; a row that was
alone in the process twice when it died is not run any more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eesd_dist.errors import EesdError, EngineError, PoisonRequest

MAX_DEATHS_ALONE = 2
MAX_BARREN_DEATHS = 8
"""Deaths of one engine without any news of a row in between, after which the job ends."""


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
    """Counts deaths by row, for all engines of a job."""

    def __init__(self) -> None:
        self._running: dict[str, Counter[str]] = {}
        """The rows in each engine."""
        self._engines: set[str] = set()
        """Engines that have started."""
        self._num_barren_deaths: Counter[str] = Counter()
        """Deaths by engine since a row was answered, or given up."""
        self._deaths: Counter[str] = Counter()
        self._deaths_alone: Counter[str] = Counter()

    def restarted(self, engine: str) -> int:
        """Notes that an engine's process starts. If there was one before it, counts its death as
        `died` does."""
        if engine in self._engines:
            return self.died(engine)
        self._engines.add(engine)
        return 0

    def died(self, engine: str) -> int:
        """Counts the death of an engine's process; returns the number of its rows. Raises
        EngineError when engines die and answer nothing."""
        rows = self._running.pop(engine, Counter())
        self._deaths.update(rows.keys())
        if rows.total() == 1:
            self._deaths_alone.update(rows.keys())
        self._num_barren_deaths[engine] += 1
        if self._num_barren_deaths[engine] > MAX_BARREN_DEATHS:
            raise EngineError(
                f"an engine has died {self._num_barren_deaths[engine]} times in a row, and no row "
                "was answered in between: its log has the reason"
            )
        return rows.total()

    def give_up(self) -> None:
        """Notes that a row is not run any more: engines that died with it may work now."""
        self._num_barren_deaths.clear()

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
        self._num_barren_deaths.clear()
        running = self._running.get(engine, Counter())
        running.subtract(rows)
        for row in rows:
            if running[row] <= 0:
                del running[row]
            del self._deaths[row], self._deaths_alone[row]


def poison(custom_id: str, suspicion: Suspicion) -> EesdError:
    """Returns the error of a row that is not run any more."""
    return PoisonRequest(
        request_id=custom_id,
        crashes=suspicion.num_deaths,
        reason="the engine's process died each time, at last while it ran alone",
    )
