"""Rows of the report; a section's process sends each as a line of JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the report: a measurement or a check."""

    section: str
    name: str
    ok: bool | None = None
    """None: a measurement, or a check that is not possible on this machine."""
    value: float | str | None = None
    unit: str = ""
    detail: str = ""

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Parses a row. Raises ValueError or TypeError for a line that is no row."""
        return cls(**json.loads(line))


class Rows:
    """Reports a section's rows, emitted one by one."""

    def __init__(self, section: str, emit: Callable[[Row], None]) -> None:
        self._section = section
        self._emit = emit

    def prove(
        self,
        name: str,
        ok: bool,
        *,
        value: float | str | None = None,
        unit: str = "",
        detail: str = "",
    ) -> None:
        self._row(name, ok, value, unit, detail)

    def measure(
        self, name: str, value: float | str | None, unit: str = "", *, detail: str = ""
    ) -> None:
        self._row(name, None, value, unit, detail)

    def cannot(self, name: str, reason: str, *, detail: str = "") -> None:
        """Reports a check that is not possible here, with a reason such as "needs cuda"."""
        self._row(name, None, reason, "", detail)

    def _row(
        self, name: str, ok: bool | None, value: float | str | None, unit: str, detail: str
    ) -> None:
        section = self._section
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no such numbers
        self._emit(Row(section=section, name=name, ok=ok, value=value, unit=unit, detail=detail))
