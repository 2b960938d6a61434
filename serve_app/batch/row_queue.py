"""The rows of a job that have no result yet: to be run, in an engine, or under suspicion.

A row that was in an engine when it died is run again apart from others (`quarantine`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from serve_app.batch.loop import TakeResult
from serve_app.batch.quarantine import Quarantine, poison
from serve_app.batch.results import RowResult, failed
from serve_app.batch.rows import Row

_MAX_GROUP = 8
"""Rows that run apart from others at first: one of them may kill the engine again."""


class RowQueue:
    """Gives rows to engines, each to one at a time, and passes results on, one for each row."""

    def __init__(self, rows: Iterator[Row], take: TakeResult, *, num_rows: int) -> None:
        """`num_rows`: how many rows there are."""
        self._rows = rows
        self._take = take
        self._is_read = False
        """True when there are no more rows to read."""
        self._num_left = num_rows
        """Rows without a result."""
        self._in_engines: dict[str, dict[int, Row]] = {}
        """Rows in each engine by ordinal; an engine without a process has no entry."""
        self._suspects: deque[Row] = deque()
        self._quarantine = Quarantine()
        self.on_change: list[Callable[[], None]] = []
        """Called when an engine may take other rows than before."""

    @property
    def is_done(self) -> bool:
        """True if all rows have results."""
        return self._is_read and not self._suspects and not any(self._in_engines.values())

    def join(self, engine: str) -> None:
        """Notes that an engine has a process."""
        self._in_engines[engine] = {}
        self._changed()

    def rows_per_engine(self) -> float:
        """Returns the rows that are left, for each engine with a process."""
        return self._num_left / max(1, len(self._in_engines))

    def share(self) -> int:
        """Returns how many rows an engine may have, so that none of the others is idle."""
        return max(1, math.ceil(self.rows_per_engine()))

    def next(self, engine: str, number: int) -> list[Row]:
        """Returns up to so many rows, which are in the engine from now on. Raises what reading them
        raises."""
        rows = list(islice(self._rows, max(0, number)))
        if len(rows) < number:
            self._is_read = True
            if self.is_done:
                self._changed()
        self._begin(engine, rows)
        return rows

    def suspects(self, engine: str) -> list[Row]:
        """Returns rows that run apart from all others, which are in the engine from now on."""
        rows: list[Row] = []
        while self._suspects and len(rows) < _MAX_GROUP:
            row = self._suspects[0]
            (suspicion,) = self._quarantine.suspicions([row.custom_id])
            if suspicion.runs_alone and rows:
                break
            self._suspects.popleft()
            if suspicion.is_poison:
                self._quarantine.give_up()
                self._finish(failed(row, poison(row.custom_id, suspicion)))
                continue
            rows.append(row)
            if suspicion.runs_alone:
                break
        self._begin(engine, rows)
        return rows

    def end(self, engine: str, result: RowResult) -> None:
        """Takes the result of a row of an engine. Raises what `take` raises."""
        del self._in_engines[engine][result.ordinal]
        self._quarantine.end(engine, [result.custom_id])
        self._finish(result)

    def died(self, engine: str) -> int:
        """Takes back the rows of an engine without a process; returns their number. Raises
        EngineError when engines die and answer nothing."""
        rows: dict[int, Row] = self._in_engines.pop(engine, {})
        # First: each row is cleared, or named, before the next one is suspected.
        self._suspects.extendleft(reversed(rows.values()))
        if rows:  # else it died while it loaded, which the pool counts
            self._quarantine.died(engine)
        self._changed()
        return len(rows)

    def _begin(self, engine: str, rows: list[Row]) -> None:
        self._in_engines[engine].update((row.ordinal, row) for row in rows)
        if rows:
            self._quarantine.begin(engine, [row.custom_id for row in rows])

    def _finish(self, result: RowResult) -> None:
        self._num_left -= 1
        self._take(result)
        if self.is_done:
            self._changed()

    def _changed(self) -> None:
        for call in self.on_change:
            call()
