"""The steps of a request in docs/architecture.md name files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def _steps() -> list[tuple[int, str]]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    life = text.split("## A request's life")[1].split("\n## ")[0]
    return [(int(number), line) for number, line in STEP.findall(life)]


def _names(file: Path) -> set[str]:
    """Returns the functions, and the methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_a_requests_life_has_at_most_fifteen_numbered_lines() -> None:
    assert [number for number, _ in _steps()] == list(range(1, 16))


@pytest.mark.parametrize(("number", "line"), _steps())
def test_every_line_begins_with_a_file_and_a_function_that_exist(number: int, line: str) -> None:
    places = PLACE.findall(line)
    assert line.startswith("`"), number
    assert places, number
    for file, name in places:
        assert name in _names(ROOT / file), f"{file} has no {name}"
