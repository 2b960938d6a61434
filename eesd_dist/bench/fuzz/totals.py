"""Totals of a run, and the state file with which a run continues after an interruption.

The file has one JSON object per line: first the settings of the run, then one for each finished
engine. A run with the same settings continues after the last one; other settings are refused.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eesd_dist.bench.fuzz.cases import Case
from eesd_dist.bench.fuzz.check import Checked
from eesd_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """Results of one finished engine."""

    number: int
    model: str
    dtype: str
    ranks: str
    tokens: int
    texts: int
    plain_tokens: int
    seconds: float
    counts: Mapping[str, int]
    failures: tuple[Mapping[str, object], ...] = ()

    @classmethod
    def of(
        cls,
        case: Case,
        checked: Checked,
        *,
        plain_tokens: int,
        seconds: float,
        case_file: str | None,
    ) -> "EngineRow":
        return cls(
            number=case.number,
            model=case.world.model,
            dtype=case.world.types,
            ranks=f"draft {case.world.draft_ranks}, verify {case.world.verify_ranks}",
            tokens=checked.num_tokens,
            texts=checked.num_texts,
            plain_tokens=plain_tokens,
            seconds=round(seconds, 3),
            counts={name: count for name, count in sorted(checked.counts.items()) if count},
            failures=tuple(
                {"entry": failure.entry, "what": failure.what, "case": case_file}
                for failure in checked.failures
            ),
        )

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "EngineRow":
        return cls(**{**row, "failures": tuple(row["failures"])})


@dataclass(slots=True)
class Totals:
    """Sums over finished engines."""

    tokens: int = 0
    texts: int = 0
    engines: int = 0
    mismatches: int = 0
    plain_tokens: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    tokens_by_dtype: Counter[str] = field(default_factory=Counter)
    tokens_by_model: Counter[str] = field(default_factory=Counter)
    tokens_by_ranks: Counter[str] = field(default_factory=Counter)
    failures: list[Mapping[str, object]] = field(default_factory=list)

    def add(self, row: EngineRow) -> None:
        self.tokens += row.tokens
        self.texts += row.texts
        self.engines += 1
        self.mismatches += len(row.failures)
        self.plain_tokens += row.plain_tokens
        self.seconds += row.seconds
        self.counts.update(row.counts)
        self.tokens_by_dtype[row.dtype] += row.tokens
        self.tokens_by_model[row.model] += row.tokens
        self.tokens_by_ranks[row.ranks] += row.tokens
        self.failures += [{"number": row.number, **failure} for failure in row.failures]

    def to_json(self) -> dict[str, object]:
        counts = dict(sorted(self.counts.items()))
        troubles = {
            name.removeprefix("trouble "): count
            for name, count in counts.items()
            if name.startswith("trouble ")
        }
        return {
            "tokens": self.tokens,
            "texts": self.texts,
            "engines": self.engines,
            "mismatches": self.mismatches,
            "tokens_by_dtype": dict(self.tokens_by_dtype),
            "tokens_by_model": dict(self.tokens_by_model),
            "tokens_by_ranks": dict(self.tokens_by_ranks),
            "troubles": troubles,
            "counts": {name: n for name, n in counts.items() if not name.startswith("trouble ")},
            "plain_tokens": self.plain_tokens,
            "seconds": round(self.seconds, 1),
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else None,
            "failures": list(self.failures),
        }


class StateFile:
    """The finished engines of a run, on disk."""

    def __init__(self, file: Path | None, *, settings: Mapping[str, object]) -> None:
        """`file`: None writes nothing. Raises ConfigError for a file of another run."""
        self._file = file
        self.rows: list[EngineRow] = []
        if file is None:
            return
        if file.exists() and file.stat().st_size:
            self.rows = _rows(file, settings)
        else:
            file.write_text(json.dumps({"asked": settings}) + "\n")

    def add(self, row: EngineRow) -> None:
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(row.to_json()) + "\n")


def _rows(file: Path, settings: Mapping[str, object]) -> list[EngineRow]:
    head, *lines = file.read_text().splitlines(keepends=True)
    try:
        stored_settings = json.loads(head)["asked"]
        # An incomplete last line, from an interruption, is dropped and its engine runs again.
        whole = [line for line in lines if line.endswith("\n")]
        rows = [EngineRow.from_json(json.loads(line)) for line in whole]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: found no state of the fuzz ({error})") from error
    if stored_settings != dict(settings):
        raise ConfigError(
            f"{file}: found a run with {stored_settings}, expected {dict(settings)}: "
            "use another file"
        )
    if len(whole) < len(lines):
        file.write_text(head + "".join(whole))
    return rows
