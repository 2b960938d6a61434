"""Checks that variables and arguments are named after what they are.

    python infra/check_names.py [ROOT]

A participle or a pronoun ("found", "each", "num_told") says nothing of the value: the name of a
thing does ("prefix_pages", "request", "num_options"). A name counts if one of its parts, split at
`_`, is in the list below. Each folder has a number of such names that is allowed, and may only
fall; the exit status is 1 if there are more.
"""

import ast
import re
import sys
from collections.abc import Iterator

from falling_counts import check

WORDS = re.compile(
    r"(?:^|_)(?:found|asked|kept|told|given|taken|begun|wanted|named|said|made|added|known|joined|"
    r"counted|placed|sent|heard|blamed|refused|awake|alone|behind|ahead|together|mine|each|one|two|"
    r"several|every|rest|least|most|news|beat|mark|place|ways?|parts?|pieces?|far|near|late|later|"
    r"soon|here|there|again|now)(?:_|$)"
)
ALLOWED = {"eesd_dist": 34, "serve_app": 2, "cluster": 6, "infra": 0, "tests": 5}
"""Names by folder. Lower a number when the check says so."""


def main(arguments: list[str]) -> int:
    return check(
        arguments,
        empty_names_of,
        allowed=ALLOWED,
        noun="variables and arguments that a participle or a pronoun names",
        advice="name new ones after the thing, as in 'prefix_pages' instead of 'found', 'request' "
        "instead of 'each'",
    )


def empty_names_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields line number and name of each binding with one of the words in its name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if WORDS.search(name):
                yield node.lineno, name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
