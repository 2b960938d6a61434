"""The table is aligned and narrow, and ends with the result."""

from eesd_dist.bench.gpu_check.report import WIDTH, table_of
from eesd_dist.bench.gpu_check.report_rows import Row

ROWS = [
    Row(section="versions", name="copy", value=2987.123, unit="GB/s", detail="1024 MiB 2987"),
    Row(section="invariance", name="a long name of a row", ok=True, value="7 of 7", unit="shapes"),
    Row(section="exactness", name="fuzz", ok=False, value=0.00021, detail="x" * 300),
]


def test_columns_are_aligned_and_lines_are_short() -> None:
    table = table_of(ROWS, minutes=1.25)
    head, *lines = table[: len(ROWS) + 1]
    at = head.index("value")
    assert [line[at:].split("  ")[0] for line in lines] == [
        "2987 GB/s",
        "7 of 7 shapes",
        "2.10e-04",
    ]
    assert all(len(line) <= WIDTH for line in [head, *lines])
    assert table[-2] == "FAILED exactness, fuzz: 2.10e-04 " + "x" * 300
    assert table[-1] == "1 ok, 1 failed (exactness), 1 measured or not possible here, 1.2 minutes"


def test_a_row_survives_the_way_between_processes() -> None:
    assert [Row.from_line(row.to_line()) for row in ROWS] == ROWS
