"""docs/planning.md shows what the planner computes."""

from pathlib import Path

import pytest

from cluster.planning.tables import LOADS, limit_rows_of, rows_of, small_rows_of, tables

PAGE = Path(__file__).parents[3] / "docs/planning.md"


def test_the_page_has_the_rows_of_the_planner() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [*rows_of("llama-2-13b", 1), *small_rows_of("llama-3-8b")]
    rows += limit_rows_of("llama-2-13b")
    assert [row for row in rows if row not in lines] == []
    assert LOADS[0] == 1


@pytest.mark.slow
def test_the_page_ends_with_the_tables_of_the_command() -> None:
    marked = f"<!-- forecasts -->\n\n{tables()}\n\n<!-- end of forecasts -->\n"
    assert PAGE.read_text().endswith(marked)
