"""Checks that docstrings start with a verb or with the noun that the thing is.

    python infra/check_docstrings.py [ROOT]

A docstring that starts with one of the words below ("Of its tokens.", "Whether it waits.") is a
fragment, which is read only together with a name. Attribute docstrings count too. Each folder has a
number of fragments that is allowed, and may only fall; the exit status is 1 if there are more.
"""

import ast
import re
import sys
from collections.abc import Iterator

from falling_counts import check

OPENINGS = re.compile(
    r"[`,.:]*(?:After|As|At|Before|By|Each|For|From|How|If|In|Its|Not|Of|On|One|Only|Since|That|"
    r"Those|To|Until|Up|What|When|Where|Whether|Who|Why|With|Without)[`,.:]*(?:\s|$)"
)
ALLOWED = {"eesd_dist": 0, "serve_app": 0, "cluster": 0, "infra": 0, "tests/support": 27}
"""Fragments by folder. Lower a number when the check says so."""


def main(arguments: list[str]) -> int:
    return check(
        arguments,
        fragments_of,
        allowed=ALLOWED,
        noun="docstrings that start as fragments",
        advice="start new ones with a verb ('Returns', 'Owns') or with the noun that the thing is, "
        "as in 'Number of rounds', 'True if it waits'",
    )


def fragments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields line number and first line of each docstring that starts as a fragment."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if OPENINGS.match(text.lstrip()):
                yield node.lineno, text.strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
