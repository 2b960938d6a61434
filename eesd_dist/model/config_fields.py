"""Reads a JSON object and typed values of a config.json; each error names file, key and value."""

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path

from eesd_dist.errors import CheckpointError

_LARGEST = 10**8
"""Largest dimension: above it, the file is wrong."""


class ConfigFields:
    """Fields of one config.json over a family's defaults; a null counts as absent."""

    def __init__(
        self, config: Mapping[str, object], *, file: Path, defaults: Mapping[str, object]
    ) -> None:
        self._config = config
        self._defaults = defaults
        self.file = file

    def get(self, key: str) -> object:
        """Returns the value in the file, without defaults."""
        return self._config.get(key)

    def says_null(self, key: str) -> bool:
        return key in self._config and self._config[key] is None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise self.error(key, expected=f"a positive integer, at most {_LARGEST}")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self._value(key, None)
        return value if isinstance(value, int) else None

    def number(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise self.error(key, expected="a number")
        return float(value)

    def positive(self, key: str) -> float:
        value = self._value(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise self.error(key, expected="a positive number")
        return float(value)

    def positive_or_null(self, key: str) -> float | None:
        """Returns None only if the file has null."""
        return None if self.says_null(key) else self.positive(key)

    def flag(self, key: str) -> bool:
        value = self._value(key, False) or False
        if not isinstance(value, bool):
            raise self.error(key, expected="true or false")
        return value

    def error(self, key: str, *, expected: str) -> CheckpointError:
        return CheckpointError(
            file=self.file, found=f"{key} = {self._config.get(key)!r}", expected=expected
        )

    def _value(self, key: str, default: object) -> object:
        value = self._config.get(key)
        return self._defaults.get(key, default) if value is None else value


def read_json(file: Path) -> dict[str, object]:
    """Returns one JSON object. Raises CheckpointError with the file if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(file=file, found="no such file", expected="a JSON object") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(file=file, found=str(error), expected="a JSON object") from error
    if not isinstance(content, dict):
        raise CheckpointError(file=file, found=type(content).__name__, expected="a JSON object")
    return content
