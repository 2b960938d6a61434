"""Checks the words of comments, docstrings, log and error messages, and documents.

    python infra/check_words.py [PATH ...]

Code and documents use the words of docs/glossary.md. The list below contains words that have a
better one there, and words for persons that are used for processes. Prints each occurrence with the
replacement; the exit status is 1 if there is one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("eesd_dist", "serve_app", "cluster", "infra", "tests")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs")
NOT_PROSE = ("docs/benchmarks", "docs/glossary.md", "infra/check_words.py")
"""Records, and the files that have to name the words."""

WORDS = {
    r"who(?:ever|m|se)?": "name the request, worker, process or operator",
    r"nobody|everybody|everyone|somebody|anybody": "name the process or data",
    r"its like|their likes": "peer rank",
    r"anew": "again, or name what is new",
    r"elsewhere": "name the place",
    r"beside": "with, next to, in addition to",
    r"crews?|posts?": "worker group, rank slot",
    r"keepers?": "supervisor",
    r"recruit\w*|dismiss\w*|disband\w*|send away": "spawn, kill, end the epoch",
    r"stand-?ins?|stands? in|changing over|change over": "fallback, failing back",
    r"strikes?|telling strikes?|poisonous": "crash, attributable crash, poison request",
    r"hand(?:s|ed|ing)?[- ]over": "KV migration",
    r"loans?|landings?|lend\w*|lent": "page lease, reservation",
    r"whereabouts|errands?": "process info, background tasks",
    r"steering|targeting": "load balancing, request routing",
    r"purses?": "exploration budget",
    r"cohorts?|taking turns": "microbatch, overlap policy",
    r"spool\w*": "recorder",
    r"blows?|wounds?": "fault, open fault",
    r"is whole|not whole|whole again": "ready, unavailable",
    r"seats?": "group handle",
    r"wish(?:es|ed)?": "request, setting, option",
    r"meanwhile": "while the group starts, during the round",
    r"come out|let go": "leave, release, cancel",
}
ALLOWED = re.compile(r"`[^`]*`|HTTP POST|\bposts? (?:a|the|its) request")
"""Code in backquotes, and words in their ordinary sense."""
_LIST = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), better) for word, better in WORDS.items()]


def main(paths: list[str]) -> int:
    roots = [Path(path).resolve() for path in paths] or [ROOT / p for p in (*SOURCES, *DOCUMENTS)]
    num_words = 0
    for file in sorted(set(_files(roots))):
        for line, text in _prose(file):
            for pattern, better in _LIST:
                for match in pattern.finditer(ALLOWED.sub("", text)):
                    num_words += 1
                    print(f"{file.relative_to(ROOT)}:{line}: {match[0]!r}: write {better}")
    if num_words:
        print(f"{num_words} words to replace; the glossary is docs/glossary.md", file=sys.stderr)
    return 1 if num_words else 0


def _files(roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        files = [root] if root.is_file() else [*root.rglob("*.py"), *root.rglob("*.md")]
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            if not name.startswith(NOT_PROSE):
                yield file


def _prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yields line number and text of the prose in the file."""
    text = file.read_text()
    if file.suffix == ".md":
        yield from _document(text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            yield from _lines(node.value)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from _texts(node.msg)
        elif isinstance(node, ast.Raise) or _is_log(node):
            yield from _texts(node)


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    for inner in ast.walk(node):
        if _is_text(inner):
            yield from _lines(inner)


def _document(text: str) -> Iterator[tuple[int, str]]:
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "logger"
    )


def _lines(node: ast.AST) -> Iterator[tuple[int, str]]:
    assert isinstance(node, ast.Constant)
    for offset, line in enumerate(str(node.value).splitlines()):
        yield node.lineno + offset, line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
