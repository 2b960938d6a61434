"""Oracle: the same job with an output of JSON lines."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eesd_dist.errors import ConfigError
from serve_app.batch import part_folder
from serve_app.batch.job import BatchOptions, BatchReport
from serve_app.batch.outputs import output_of
from serve_app.batch.records import Recovery
from tests.support.toy_batch import run

QUIET = BatchOptions(show_progress=False)
NUM_ROWS = 20


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_folder, "_ROWS_PER_PART", 3)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    rows = [{"id": f"r{i}", "prompt": f"prompt {i}", "max_tokens": 12} for i in range(NUM_ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"id": "bad"}]))
    return file


def _expected(rows: Path, tmp_path: Path) -> dict[str, object]:
    run(rows, tmp_path / "expected.jsonl", options=QUIET)
    records = map(json.loads, (tmp_path / "expected.jsonl").read_text().splitlines())
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}


def _texts(folder: Path) -> dict[str, object]:
    table = [
        row for file in folder.glob("part-*.parquet") for row in pq.read_table(file).to_pylist()
    ]
    assert len({row["custom_id"] for row in table}) == len(table)
    assert all(row["num_generated_tokens"] == 12 for row in table)
    assert all(row["custom_id"] == f"r{row['row']}" for row in table)
    return {row["custom_id"]: row["generated_text"] for row in table}


def test_parquet_parts_have_every_row_once_and_errors_apart(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out.parquet"
    report = run(rows, folder, options=QUIET)
    assert (report.num_completed, report.num_failed) == (NUM_ROWS, 1)
    assert _texts(folder) == _expected(rows, tmp_path)
    (errors,) = folder.glob("errors-*.jsonl")
    assert json.loads(errors.read_text())["custom_id"] == "bad"
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("name", ["out.parquet", "out/"])
def test_a_second_run_answers_what_is_missing_and_nothing_else(
    rows: Path, tmp_path: Path, name: str
) -> None:
    folder, options = tmp_path / name, replace(QUIET, format=None)
    if name == "out/":
        folder.mkdir()

    def again(recovery: Recovery) -> BatchReport:
        return run(rows, folder, options=replace(options, recovery=recovery))

    run(rows, folder, options=options)
    before = sorted(folder.glob("part-*"))
    lost = before[2]
    is_table = lost.suffix == ".parquet"
    num_lost = pq.read_metadata(lost).num_rows if is_table else lost.read_bytes().count(b"\n")
    lost.unlink()
    report = again(Recovery())
    assert (report.num_completed, report.num_failed_before) == (num_lost, 1)
    assert list(folder.parent.glob(str(Path(report.errors_path).relative_to(folder.parent))))
    assert num_lost > 0
    assert again(Recovery(retry_errors=True)).num_failed == 1
    assert again(Recovery()).num_skipped == NUM_ROWS + 1
    if name == "out.parquet":
        assert _texts(folder) == _expected(rows, tmp_path)


def test_rows_that_changed_are_refused_in_a_folder_too(rows: Path, tmp_path: Path) -> None:
    run(rows, tmp_path / "out.parquet", options=QUIET)
    rows.write_text(rows.read_text().replace("prompt 7", "another"))
    with pytest.raises(ConfigError, match=r"1 rows were answered already .* 'r7'"):
        run(rows, tmp_path / "out.parquet", options=QUIET)


def test_a_folder_has_no_order_and_holds_one_job(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sort by the column `row`, or name a \.jsonl file"):
        run(rows, tmp_path / "out.parquet", options=replace(QUIET, ordered=True))
    (tmp_path / "in").mkdir()
    rows.rename(tmp_path / "in" / "rows.jsonl")
    with pytest.raises(ConfigError, match="is the output itself"):
        run(tmp_path / "in", tmp_path / "in", options=QUIET)


def test_an_output_of_a_form_that_is_not_written_is_refused(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out.csv: found an output in a form"):
        run(rows, tmp_path / "out.csv", options=QUIET)


def test_half_a_character_has_a_place_in_a_table(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"id": "\ud800", "prompt": "x", "max_tokens": 2}) + "\n")
    for num_skipped in (0, 1):
        report = run(file, tmp_path / "out.parquet", options=QUIET)
        assert (report.num_skipped, report.num_failed) == (num_skipped, 0)


def test_a_file_that_is_no_part_is_refused(rows: Path, tmp_path: Path) -> None:
    run(rows, tmp_path / "out.parquet", options=QUIET)
    (tmp_path / "out.parquet" / "part-9.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ConfigError, match=r"part-9\.parquet: is no part of a batch"):
        run(rows, tmp_path / "out.parquet", options=QUIET)
    with pytest.raises(ConfigError, match="expected a path or a URI"):
        output_of("foo://x/y", format=None, ordered=False)
