import json
from contextlib import closing
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from serve_app.batch.inputs import inputs_of
from serve_app.batch.ledger import Ledger, RowState


def _write(file: Path, rows: list[dict[str, object]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _ids(word: str) -> list[str]:
    with closing(Ledger()) as ledger, inputs_of(word) as inputs:
        ledger.scan(inputs)
        return [row.custom_id for row in ledger.pending(inputs)]


def test_equal_rows_have_ids_of_their_own_that_do_not_depend_on_how_files_are_cut(
    tmp_path: Path,
) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"p{i % 3}"} for i in range(7)]
    ids = _ids(_write(tmp_path / "one.jsonl", rows))
    assert len(set(ids)) == 7
    (tmp_path / "cut").mkdir()
    _write(tmp_path / "cut" / "a.jsonl", rows[:2])
    _write(tmp_path / "cut" / "b.jsonl", rows[2:])
    assert _ids(str(tmp_path / "cut")) == ids
    assert set(_ids(_write(tmp_path / "turned.jsonl", rows[::-1]))) == set(ids)


def test_only_rows_that_are_not_done_are_pending(tmp_path: Path) -> None:
    word = _write(tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": "x"} for i in range(5)])
    with closing(Ledger()) as ledger, inputs_of(word) as inputs:
        ledger.scan(inputs)
        ledger.mark([(1, RowState.ANSWERED), (3, RowState.FAILED)])
        pending = list(ledger.pending(inputs))
        assert [row.custom_id for row in pending] == ["r0", "r2", "r4"]
        assert [row.ordinal for row in pending] == [0, 2, 4]
        assert (ledger.count(RowState.ANSWERED), ledger.count(RowState.FAILED)) == (1, 1)
        entries = ledger.known(["r3", "other"])
        assert entries[0] is not None
        assert (entries[0].ordinal, entries[0].state) == (3, RowState.FAILED)
        assert entries[1] is None


@pytest.mark.parametrize(
    ("new_rows", "complaint"),
    [
        ([{"id": "a", "prompt": "x"}], "fewer rows"),
        ([{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "z"}], "in.jsonl:2 has another"),
        ([{"id": i, "prompt": p} for i, p in ("ax", "by", "cz")], "more rows"),
    ],
)
def test_an_input_that_changes_during_the_run_is_noticed(
    tmp_path: Path, new_rows: list[dict[str, object]], complaint: str
) -> None:
    file = tmp_path / "in.jsonl"
    word = _write(file, [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}])
    with closing(Ledger()) as ledger, inputs_of(word) as inputs:
        ledger.scan(inputs)
        _write(file, new_rows)
        with pytest.raises(ConfigError, match=rf"had 2 rows, and has changed .*{complaint}"):
            list(ledger.pending(inputs))
