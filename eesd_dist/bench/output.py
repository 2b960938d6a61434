"""What a benchmark prints: text as it goes, and one JSON object at the end."""

import json
import sys
from collections.abc import Callable, Mapping

Say = Callable[[str], None]


def say_unless(only_json: bool) -> Say:
    """Prints a line at once, or not at all."""
    return _silent if only_json else _say


def print_report(report: Mapping[str, object]) -> None:
    """The last line of the output."""
    sys.stdout.write(json.dumps(report) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _silent(text: str) -> None:
    del text
