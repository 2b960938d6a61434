"""Output of a benchmark: lines of progress, and one JSON object at the end."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from eesd_dist.provenance import collect_provenance

Say = Callable[[str], None]


def say_unless(only_json: bool) -> Say:
    """Returns a function that prints a line at once, or nothing if `only_json`."""
    return _silent if only_json else _say


def print_report(report: Mapping[str, object], *, seed: int | None = None) -> None:
    """Prints the last line of the output: the report, and the provenance of its figures."""
    content = {**report, "provenance": collect_provenance(seed=seed).as_json()}
    sys.stdout.write(json.dumps(_plain(content), allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """Replaces infinity, which JSON does not have, by "inf"."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _silent(text: str) -> None:
    del text
