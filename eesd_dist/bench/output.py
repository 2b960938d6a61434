"""Output of a benchmark: lines of progress, and one JSON object at the end."""

import json
import sys
from collections.abc import Callable, Mapping

Say = Callable[[str], None]


def say_unless(only_json: bool) -> Say:
    """Returns a function that prints a line at once, or nothing if `only_json`."""
    return _silent if only_json else _say


def print_report(report: Mapping[str, object]) -> None:
    """Prints the last line of the output."""
    sys.stdout.write(json.dumps(report) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _silent(text: str) -> None:
    del text
