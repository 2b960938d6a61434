"""Checks that share one rule: each folder has a number of occurrences that may only fall."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def check(
    arguments: list[str],
    occurrences_of: Callable[[str], Iterable[tuple[int, str]]],
    *,
    allowed: Mapping[str, int],
    noun: str,
    advice: str,
) -> int:
    """Prints the occurrences in each folder that has too many; returns the exit status.

    `occurrences_of` returns line numbers and texts from the source of a file.
    """
    root = Path(arguments[0]).resolve() if arguments else REPOSITORY
    has_failed = False
    for folder, limit in allowed.items():
        occurrences = [
            f"{file.relative_to(root)}:{line}: {text}"
            for file in sorted((root / folder).rglob("*.py"))
            for line, text in occurrences_of(file.read_text())
        ]
        message = f"{folder}: found {len(occurrences)} {noun}, {limit} allowed: "
        if len(occurrences) > limit:
            has_failed = True
            print(*occurrences, sep="\n")
            print(message + advice, file=sys.stderr)
        elif len(occurrences) < limit and (root / folder).is_dir():
            print(f"{message}lower the number in infra/{Path(sys.argv[0]).name}")
    return 1 if has_failed else 0
