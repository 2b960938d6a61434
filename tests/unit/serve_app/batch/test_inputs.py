"""Oracle: the same rows as plain JSON lines."""

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eesd_dist.errors import ConfigError
from serve_app.batch import inputs
from serve_app.batch.inputs import inputs_of
from serve_app.batch.rows import Row, row_of

ROWS: list[dict[str, object]] = [
    {"id": f"r{i}", "prompt": f'row {i}, "quoted"\nand long', "max_tokens": 3 + i} for i in range(9)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _rows(word: object) -> list[Row]:
    with inputs_of(str(word)) as files:
        return [row_of(raw) for raw in files.raw_rows()]


def _asked(word: object) -> list[tuple[str, object]]:
    rows = _rows(word)
    assert not any(row.problem for row in rows)
    return [(row.custom_id, dict(row.body)) for row in rows]


@pytest.fixture
def expected(tmp_path: Path) -> list[tuple[str, object]]:
    file = tmp_path / "plain.jsonl"
    file.write_bytes(LINES)
    return _asked(file)


def _as_csv() -> bytes:
    text = io.StringIO()
    table = csv.DictWriter(text, list(ROWS[0]))
    table.writeheader()
    table.writerows(ROWS)
    return text.getvalue().encode()


def _compressed(content: bytes, *, name: str) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, name) as stream:
        stream.write(content)
    return buffer.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "content",
    [
        LINES.removesuffix(b"\n"),
        LINES.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + LINES,
        b"\n\n" + LINES.replace(b"\n", b"\n\n"),
        gzip.compress(LINES[:200]) + gzip.compress(LINES[200:]),
        _compressed(LINES, name="zstd"),
        _as_csv(),
        b"\xef\xbb\xbf" + _as_csv(),
        gzip.compress(_as_csv()),
    ],
    ids=[
        "no end",
        "crlf",
        "bom",
        "empty lines",
        "gzip members",
        "zstd",
        "csv",
        "bom csv",
        "csv.gz",
    ],
)
def test_the_first_bytes_say_what_a_file_is(
    tmp_path: Path, expected: list[tuple[str, object]], content: bytes
) -> None:
    file = tmp_path / "input"
    file.write_bytes(content)
    assert _asked(file) == expected


def test_lines_are_found_wherever_the_pieces_that_are_read_end(
    tmp_path: Path, expected: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 7, 64):
        monkeypatch.setattr(inputs, "_CHUNK_BYTES", size)
        assert _asked(tmp_path / "plain.jsonl") == expected


def test_parquet_rows_have_columns_of_ray_data(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [{"role": "user", "content": f"hi {i}"}],
            "sampling_params": {"max_tokens": 4, "temperature": None if i % 2 else 0.5},
            "label": i,
        }
        for i in range(5)
    ]
    chats[0]["messages"] = [{"role": "user", "content": "hi 0", "name": "ada"}]
    file = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist(chats), file, row_group_size=2)
    with inputs_of(str(file)) as files:
        assert files.unused_columns == ("label",)
        rows = [row_of(raw) for raw in files.raw_rows()]
    assert [row.kind for row in rows] == ["chat"] * 5
    assert rows[0].body == {
        "messages": [{"role": "user", "content": "hi 0", "name": "ada"}],
        "max_tokens": 4,
        "temperature": 0.5,
    }
    # Arrow gives every struct all fields: those that a row lacks are not sent as null.
    assert rows[1].body == {"messages": [{"role": "user", "content": "hi 1"}], "max_tokens": 4}


def test_a_folder_and_a_glob_are_all_their_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, rows in (("b.jsonl", ROWS[2:4]), ("a.jsonl", ROWS[:2]), ("deep/c.jsonl", ROWS[4:])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / ".hidden").write_text("not read")
    (tmp_path / "_SUCCESS").write_text("")
    assert [name for name, _ in _asked(tmp_path)] == [f"r{i}" for i in range(9)]
    assert [name for name, _ in _asked(f"{tmp_path}/[ab].jsonl")] == [f"r{i}" for i in range(4)]
    assert len(_asked(f"file://{tmp_path}/a.jsonl")) == 2
    with pytest.raises(ConfigError, match=r"x\*: found no such file"):
        _asked(f"{tmp_path}/x*")
    assert len(_asked(f"{tmp_path}/*.jsonl")) == 4
    assert len(_asked(f"{tmp_path}/**.jsonl")) == 9
    (tmp_path / "q[1].jsonl").write_bytes(LINES)
    assert len(_asked(tmp_path / "q[1].jsonl")) == 9


def test_a_glob_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a1.jsonl").write_bytes(LINES)
    assert len(_asked("a*.jsonl")) == len(_asked("./a*.jsonl")) == len(_asked("a1.jsonl")) == 9


def test_long_fields_of_a_table_are_read(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("prompt\n" + "x" * 200_000 + "\n")
    ((_, body),) = _asked(tmp_path / "long.csv")
    assert body == {"prompt": "x" * 200_000}


def test_standard_input_is_read_twice_all_the_same(
    tmp_path: Path, expected: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "plain.jsonl").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        with inputs_of("-") as files:
            for _ in range(2):
                rows = [row_of(raw) for raw in files.raw_rows()]
                assert [(row.custom_id, dict(row.body)) for row in rows] == expected


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (json.dumps(ROWS).encode(), r"found a JSON array, expected one object per line: jq"),
        (LINES.decode().encode("utf-16"), "found UTF-16, expected UTF-8: convert it with iconv"),
        (
            '{"prompt": "caf\xe9"}\n{}\n'.encode("latin-1"),
            "found byte 0xe9 at 15, which is no UTF-8",
        ),
        (LINES.replace(b"\n", b"\r"), "found lines that end with a carriage return alone"),
        (b"hello world\n", "found 'hello world.n' at its beginning, expected JSON lines, Parquet"),
        (b"question,answer\na,b\n", "CSV with a column `prompt` or `messages`"),
        (b"\x7fELF\0\0\0", "an encoding with zero bytes, or no text"),
        (gzip.compress(LINES)[:40], "cannot be read"),
        (b"PAR1 and no more", "cannot be read"),
    ],
    ids=["array", "utf-16", "latin-1", "cr", "text", "other csv", "binary", "torn gzip", "parquet"],
)
def test_a_file_of_another_kind_is_one_error(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    file = tmp_path / "input"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{file}: .*{complaint}"):
        _rows(file)


def test_a_line_without_end_and_a_field_too_many_are_errors_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_MAX_LINE_BYTES", 2**20)
    endless = tmp_path / "endless.jsonl"
    endless.write_bytes(LINES + b'{"prompt": "' + b"x" * 2**22)
    with pytest.raises(ConfigError, match=r"endless.jsonl: line 10 has more than 1 MiB"):
        _rows(endless)
    table = tmp_path / "table.csv"
    table.write_text("prompt,max_tokens\na,1\nb,2,3\n")
    with pytest.raises(ConfigError, match=r"table.csv:3: found more fields than the header has"):
        _rows(table)
