"""One line of the report, and how a section's process hands it over: as a line of JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was measured or proven."""

    section: str
    name: str
    ok: bool | None = None
    """None: a figure, or something that cannot be asked of this machine; it proves nothing."""
    value: float | str | None = None
    unit: str = ""
    detail: str = ""

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Raises ValueError or TypeError for a line that is no row."""
        return cls(**json.loads(line))


class Rows:
    """A section's way to report: rows leave as they are found."""

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
        """What this machine or checkout lacks, like "needs cuda"."""
        self._row(name, None, reason, "", detail)

    def _row(
        self, name: str, ok: bool | None, value: float | str | None, unit: str, detail: str
    ) -> None:
        section = self._section
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no such numbers
        self._emit(Row(section=section, name=name, ok=ok, value=value, unit=unit, detail=detail))
