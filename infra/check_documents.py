"""Checks the size and the form of README.md and of the pages in docs/.

    python infra/check_documents.py [ROOT]

Counts words, lines of more than 120 columns and table cells of more than 25 words, all without
generated tables. Rows of tables may be longer than a line. Each number that is allowed may only
fall; the exit status is 1 if there is more.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_COLUMNS = 120
MAX_CELL_WORDS = 25
MAX_WORDS: Mapping[str, int] = {"README.md": 900, "in all": 26_273}
LONG_LINES: Mapping[str, int] = {"docs/observability.md": 2}
"""Numbers by file, 0 for all others: outputs of commands. Lower a number when the check says so."""

_GENERATED = re.compile(r"<!-- (.+?) -->\n.*?<!-- end(?: of \1)? -->\n?", re.DOTALL)
_CELL_END = re.compile(r"(?<!\\)\|")


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]).resolve() if arguments else REPOSITORY
    pages = {
        page.relative_to(root).as_posix(): page.read_text()
        for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    }
    words = {name: len(_written(text).split()) for name, text in pages.items()}
    words["in all"] = sum(words.values())
    advice = ["cut what repeats another page"]
    counts = [(name, "words", words[name], allowed, advice) for name, allowed in MAX_WORDS.items()]
    for name, text in pages.items():
        lines, cells = list(long_lines(text)), list(long_cells(text))
        columns, size = f"lines over {MAX_COLUMNS} columns", f"cells over {MAX_CELL_WORDS} words"
        counts.append((name, columns, len(lines), LONG_LINES.get(name, 0), lines))
        counts.append((name, size, len(cells), 0, cells))
    for name, what, count, allowed, excess in counts:
        if count > allowed:
            print(f"{name}: found {count} {what}, {allowed} allowed:", *excess, sep="\n    ")
        elif count < allowed and what != "words":
            print(f"{name}: {count} {what}, {allowed} allowed: lower it in this check")
    print(f"README.md has {words['README.md']} words, all pages {words['in all']}")
    return 1 if any(count > allowed for _, _, count, allowed, _ in counts) else 0


def long_lines(text: str) -> Iterator[str]:
    """Yields the lines that are too long, rows of tables left out."""
    for line in _written(text).splitlines():
        if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|"):
            yield line


def long_cells(text: str) -> Iterator[str]:
    """Yields the cells of tables that have too many words."""
    for line in _written(text).splitlines():
        if line.lstrip().startswith("|"):
            for cell in _CELL_END.split(line):
                if len(cell.split()) > MAX_CELL_WORDS:
                    yield cell.strip()


def _written(text: str) -> str:
    """Returns the text without its generated tables."""
    return _GENERATED.sub("", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
