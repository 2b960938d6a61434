"""A section may end in any way: its rows are kept, other sections run, the exit status shows it."""

import json
from pathlib import Path

import pytest

from eesd_dist.bench.gpu_check.processes import run_section
from eesd_dist.bench.gpu_check.report_rows import Row
from eesd_dist.bench.gpu_check.runner import main, run_sections
from eesd_dist.bench.gpu_check.setting import Section

ROOT = Path(__file__).parents[4]
PLANTED = Section(name="planted", module="tests.support.planted_section", share=1.0)


@pytest.fixture(autouse=True)
def children_find_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def ending(what: str, *, seconds: float = 30.0) -> list[Row]:
    rows: list[Row] = []
    run_section(PLANTED, device="cpu", model=Path(what), seconds=seconds, emit=rows.append)
    assert rows[0] == Row(section="planted", name="before", ok=True, value=1.0, unit="ms")
    return rows[1:]


def test_a_section_that_passes_adds_nothing() -> None:
    assert ending("passes") == [Row(section="planted", name="a figure", value="nan")]


@pytest.mark.parametrize(
    ("what", "value", "detail"),
    [
        ("raises", "exit status 1", "ValueError: this card has no memory"),
        ("crashes", "ended by SIGSEGV", ""),
        ("leaves", "exit status 7", "words of a library"),
    ],
)
def test_an_end_that_is_none_is_a_failure_with_its_reason(
    what: str, value: str, detail: str
) -> None:
    (row,) = ending(what)
    assert (row.ok, row.value) == (False, value)
    assert detail in row.detail


def test_a_section_that_hangs_is_ended() -> None:
    (row,) = ending("hangs", seconds=2.0)
    assert (row.ok, row.value) == (False, "timeout after 2 s")


@pytest.mark.parametrize(("what", "status"), [("passes", 0), ("differs", 1), ("raises", 1)])
def test_the_exit_status_the_table_and_the_json_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, status: int
) -> None:
    out = tmp_path / "check.json"
    words = ["--device", "cpu", "--model", what, "--out", str(out)]
    needs_cuda = Section(name="other", module="no.such.module", share=1.0, needs_cuda=True)
    assert main(words, sections=[PLANTED, needs_cuda]) == status
    report = json.loads(out.read_text())
    assert report["ok"] is (status == 0)
    assert report["rows"][0]["name"] == "before"
    assert report["rows"][-1]["value"] == "needs cuda"
    assert {"command", "commit", "versions", "hardware"} <= report["provenance"].keys()
    lines = capsys.readouterr().out.splitlines()
    failed = "1 failed (planted)" if status else "0 failed"
    assert lines[-1].startswith(f"1 ok, {failed}, ")


def test_a_section_that_takes_all_the_time_leaves_the_others_theirs() -> None:
    slow = Section(name="slow", module="tests.support.planted_section", share=1.0)
    rows = run_sections([slow, PLANTED], device="cpu", model=Path("passes"), minutes=0.0)
    assert [row.section for row in rows if row.ok] == ["slow", "planted"]
