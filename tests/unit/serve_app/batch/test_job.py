"""Oracle: an undisturbed run over the same rows."""

import asyncio
import fcntl
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError, EngineError, PoisonRequest, QueueFull
from serve_app.batch.job import BatchOptions, TooManyErrors, run_batch
from serve_app.batch.loop import TakeResult
from serve_app.batch.record_files import RecordFile, errors_path_of
from serve_app.batch.records import Recovery
from serve_app.batch.rows import Row
from serve_app.batch.usage import Usage
from tests.support.toy_batch import MODEL, run
from tests.support.toy_engine import ToyEngine

QUIET = BatchOptions(show_progress=False)
FORCED = replace(QUIET, recovery=Recovery(force=True))


def _write(file: Path, rows: list[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _plain(num_rows: int) -> list[object]:
    return [{"id": f"r{i}", "prompt": f"prompt {i}", "max_tokens": 12} for i in range(num_rows)]


def _records(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _texts(file: Path) -> dict[object, object]:
    """Text by id; fails when an id stands there twice."""
    records = _records(file)
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}  # type: ignore[index]
    assert len(texts) == len(records)
    return texts


@contextmanager
def _room_for(num_bytes: int) -> Iterator[None]:
    """No file grows beyond it: writing fails as on a full disk (Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return _write(tmp_path / "in.jsonl", _plain(20))


def test_every_row_is_answered_once_under_its_id(rows: Path, tmp_path: Path) -> None:
    report = run(rows, tmp_path / "out.jsonl")
    assert set(_texts(tmp_path / "out.jsonl")) == {f"r{i}" for i in range(20)}
    assert (report.num_rows, report.num_completed, report.num_failed) == (20, 20, 0)
    assert report.throughput.num_tokens == 240


def test_a_killed_batch_goes_on_where_it_was_and_gives_the_same_texts(
    rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "tests.support.toy_batch", str(rows), str(output), "0.1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < 6:
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    process.kill()
    process.wait()
    num_done = output.read_bytes().count(b"\n")
    assert 6 <= num_done < 20

    report = run(rows, output)
    assert (report.num_skipped, report.num_completed) == (num_done, 20 - num_done)
    run(rows, tmp_path / "undisturbed.jsonl")
    assert _texts(output) == _texts(tmp_path / "undisturbed.jsonl")


def test_a_torn_last_line_is_cut_off_and_done_again(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(rows, output)
    whole = _texts(output)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:7]) + lines[7][:40])
    report = run(rows, output)
    assert report.num_skipped == 7
    assert _texts(output) == whole


def test_a_second_run_has_nothing_to_do(rows: Path, tmp_path: Path) -> None:
    engine = ToyEngine(vocab_size=128)
    run(rows, tmp_path / "out.jsonl")
    assert run(rows, tmp_path / "out.jsonl", engine=engine).num_skipped == 20
    assert engine.requests == []


def test_bad_rows_become_error_records_and_stop_no_other_row(tmp_path: Path) -> None:
    good = {"id": "good", "prompt": "x"}
    bad: list[tuple[str, object]] = [
        ("no prompt", {"id": "no prompt"}),
        ("both", {"id": "both", "prompt": "x", "messages": []}),
        ("hot", {"id": "hot", "prompt": "x", "temperature": 9}),
        ("long", {"id": "long", "prompt": "x" * 500}),
        ("stream", {"id": "stream", "prompt": "x", "stream": True}),
        ("url", {"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}}),
        ("get", {"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}),
        ("body", {"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": 3}),
    ]
    file = _write(tmp_path / "in.jsonl", [*(row for _, row in bad), good])
    with file.open("a") as lines:
        lines.write('{"id": "torn", "prom\n\n[1, 2]\n')
    report = run(file, tmp_path / "out.jsonl")
    assert [r["custom_id"] for r in _records(tmp_path / "out.jsonl")] == ["good"]
    records = {str(r["custom_id"]): r for r in _records(tmp_path / "out.errors.jsonl")}
    assert len(records) == len(bad) + 2
    assert {name for name, _ in bad} < set(records)
    assert report.num_completed == 1
    unnamed = [r for name, r in records.items() if name.startswith("row-")]
    assert {str(r["error"]["message"]).partition(": ")[0] for r in unnamed} == {  # type: ignore[index]
        f"{file}:10",
        f"{file}:12",
    }
    for name in records:
        response = records[name]["response"]
        assert isinstance(response, dict)
        assert response["status_code"] == 400
        assert response["body"]["error"]["message"]
        assert records[name]["error"]
    second_run = run(file, tmp_path / "out.jsonl")
    assert second_run.num_skipped == len(records) + 1
    assert (second_run.num_failed, second_run.num_failed_before) == (0, len(records))
    retried = replace(QUIET, recovery=Recovery(retry_errors=True))
    third_run = run(file, tmp_path / "out.jsonl", options=retried)
    assert (third_run.num_skipped, third_run.num_failed) == (1, len(records))
    assert len(_records(tmp_path / "out.errors.jsonl")) == len(records)


def test_openai_lines_and_plain_lines_mean_the_same(tmp_path: Path) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    run(_write(tmp_path / "openai.jsonl", [line]), tmp_path / "openai.out")
    run(_write(tmp_path / "plain.jsonl", [{"id": "a", **body}]), tmp_path / "plain.out")
    contents = [
        _records(tmp_path / name)[0]["response"]["body"]["choices"][0]["message"]["content"]  # type: ignore[index]
        for name in ("openai.out", "plain.out")
    ]
    assert contents[0] == contents[1] != ""


def test_ids_that_stand_twice_are_refused_with_both_lines(tmp_path: Path) -> None:
    file = _write(tmp_path / "in.jsonl", [*_plain(3), {"id": "r1", "prompt": "other"}])
    with pytest.raises(ConfigError, match=r"'r1' is in .*in\.jsonl:2 and .*in\.jsonl:4"):
        run(file, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_rows_of_another_model_seed_or_defaults_are_not_mixed(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(rows, output)
    with pytest.raises(ConfigError, match="model_digest 'v1', this run has 'v2'"):
        run(rows, output, model=replace(MODEL, identity={"model_digest": "v2"}))
    with pytest.raises(ConfigError, match="seed 0, this run has 1"):
        run(rows, output, options=replace(QUIET, seed=1))
    with pytest.raises(ConfigError, match="defaults"):
        run(rows, output, options=replace(QUIET, defaults={"temperature": 0}))
    forced = replace(FORCED, seed=1)
    assert run(rows, output, options=forced).num_skipped == 20


def test_a_row_that_changed_under_its_id_is_noticed(rows: Path, tmp_path: Path) -> None:
    run(rows, tmp_path / "out.jsonl")
    _write(rows, [*_plain(19), {"id": "r19", "prompt": "another question"}])
    with pytest.raises(ConfigError, match="'r19'"):
        run(rows, tmp_path / "out.jsonl")


@pytest.mark.parametrize("force", [False, True])
def test_a_bad_row_that_was_corrected_is_run_again(tmp_path: Path, force: bool) -> None:
    output = tmp_path / "out.jsonl"
    bad = {"id": "r7", "prompt": "prompt 7", "max_tokens": 12, "temperature": 9}
    file = _write(tmp_path / "in.jsonl", [*_plain(7), bad])
    assert run(file, output).num_failed == 1
    options = FORCED if force else QUIET
    assert run(file, output, options=options).num_failed_before == 1
    _write(file, _plain(8))
    report = run(file, output, options=options)
    assert (report.num_skipped, report.num_completed, report.num_failed_before) == (7, 1, 0)
    assert len(_texts(output)) == 8
    assert report.errors_path == str(errors_path_of(output))
    assert _records(errors_path_of(output)) == []


def test_a_refused_run_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    file = _write(tmp_path / "in.jsonl", [*_plain(2), {"id": "bad"}])
    run(file, output)
    before = output.read_bytes()
    _write(file, [{"id": "r0", "prompt": "another question"}, {"id": "bad", "prompt": "good"}])
    with pytest.raises(ConfigError, match=r"1 rows were answered already .* 'r0'"):
        run(file, output)
    assert output.read_bytes() == before


def test_rows_of_an_earlier_version_are_refused_with_what_to_do(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(rows, output)
    manifest = tmp_path / "out.jsonl.manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1}))
    with pytest.raises(ConfigError, match=r"another version of eesd .* name another output, or"):
        run(rows, output)
    assert run(rows, output, options=FORCED).num_skipped == 20
    assert run(rows, output).num_skipped == 20


def test_half_a_character_is_an_id_like_any_other(tmp_path: Path) -> None:
    file = _write(tmp_path / "in.jsonl", [{"id": "\ud800", "prompt": "x", "temperature": 1}])
    assert run(file, tmp_path / "out.jsonl").num_completed == 1
    assert run(file, tmp_path / "out.jsonl").num_skipped == 1


def test_an_input_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"id": "a", "prompt": "x"}\n')
    os.close(writer)
    try:
        with pytest.raises(ConfigError, match=rf"/dev/fd/{reader}: is no regular file.* use `-`"):
            run(Path(f"/dev/fd/{reader}"), tmp_path / "out.jsonl")
    finally:
        os.close(reader)


def test_a_full_disk_is_said_and_the_next_run_goes_on(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    manifest = r"out\.jsonl\.manifest\.json: cannot be written .*; make room"
    with _room_for(20), pytest.raises(ConfigError, match=manifest):
        run(rows, output)
    with _room_for(4000), pytest.raises(ConfigError, match=r"out\.jsonl: cannot .*; make room"):
        run(rows, output)
    num_done = output.read_bytes().count(b"\n")
    report = run(rows, output)
    assert (report.num_skipped, report.num_completed) == (num_done, 20 - num_done)
    assert 0 < num_done < 20
    run(rows, tmp_path / "undisturbed.jsonl")
    assert _texts(output) == _texts(tmp_path / "undisturbed.jsonl")


def test_no_room_for_a_rewritten_output_leaves_the_old_one(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.batch.loop._FIRST_PAUSE_S", 0.001)
    output = tmp_path / "out.jsonl"
    run(rows, output, engine=_FailsAtFirst(EngineError("gone"), times=10**9, only="7"))
    errors = errors_path_of(output)
    with errors.open("ab") as file:  # of another input: it is kept
        record = {"custom_id": "x" * 500, "error": {"message": "no"}, "response": {}}
        file.write(json.dumps(record).encode() + b"\n")
    before = output.read_bytes(), errors.read_bytes()
    with _room_for(400), pytest.raises(ConfigError, match="make room"):
        run(rows, output)
    assert (output.read_bytes(), errors.read_bytes()) == before
    assert not list(tmp_path.glob("*.rewriting"))
    assert run(rows, output).num_completed == 2


def test_a_line_that_found_no_room_does_not_tear_the_next_one(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "out.jsonl")
    with _room_for(2000), pytest.raises(ConfigError, match="make room"):
        file.append(json.dumps({"custom_id": "long", "text": "x" * 20_000}).encode() + b"\n")
    file.append(b'{"custom_id": "short"}\n')
    assert [record.custom_id for record in file.records()] == ["short"]
    file.close(after_error=False)


def test_a_foreign_file_is_not_appended_to(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("my thesis\n")
    with pytest.raises(ConfigError, match="no manifest"):
        run(rows, output)
    with pytest.raises(ConfigError, match="line 1 is no result"):
        run(rows, output, options=FORCED)
    output.write_text("my thesis, without an end")
    with pytest.raises(ConfigError, match="its last line is no result of a batch"):
        run(rows, output, options=FORCED)
    assert output.read_text() == "my thesis, without an end"
    output.write_text("my thesis\n")
    with pytest.raises(ConfigError, match="is the output itself"):
        run(rows, rows)
    assert output.read_text() == "my thesis\n"


def test_two_batches_never_write_one_file(rows: Path, tmp_path: Path) -> None:
    with (tmp_path / "out.jsonl.manifest.json").open("a+") as manifest:
        fcntl.flock(manifest, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another batch"):
            run(rows, tmp_path / "out.jsonl")


def test_the_output_can_be_put_in_the_order_of_the_input(rows: Path, tmp_path: Path) -> None:
    def short_when_odd(request: object) -> list[int]:
        return [65] * (1 if str(request).count("1") % 2 else 12)

    engine = ToyEngine(script=short_when_odd, delay_s=0.002)
    output = tmp_path / "out.jsonl"
    run(rows, output, engine=engine, options=replace(QUIET, ordered=True))
    assert [r["custom_id"] for r in _records(output)] == [f"r{i}" for i in range(20)]


def test_no_more_rows_run_at_once_than_asked_for(rows: Path, tmp_path: Path) -> None:
    engine = ToyEngine(vocab_size=128, delay_s=0.001)
    run(rows, tmp_path / "out.jsonl", engine=engine, concurrency=3)
    assert engine.max_live == 3


def test_a_full_queue_is_waited_for(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueFull, "retry_after_s", 0.001)
    engine = _FailsAtFirst(QueueFull(num_waiting=1, limit=1), times=30)
    assert run(rows, tmp_path / "out.jsonl", engine=engine).num_completed == 20


def test_a_row_that_failed_on_our_side_is_tried_again_by_the_next_run(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.batch.loop._FIRST_PAUSE_S", 0.001)
    output = tmp_path / "out.jsonl"
    engine = _FailsAtFirst(EngineError("rank 1 is gone"), times=10**9, only="7")
    report = run(rows, output, engine=engine)
    assert (report.num_completed, report.num_failed) == (18, 2)
    report = run(rows, output)
    assert (report.num_skipped, report.num_completed) == (18, 2)
    assert len(_texts(output)) == 20


def test_a_dead_engine_ends_the_job_and_not_fifty_thousand_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.batch.loop._FIRST_PAUSE_S", 0.001)
    file = _write(tmp_path / "in.jsonl", _plain(60))
    engine = _FailsAtFirst(EngineError("rank 1 is gone"), times=10**9)
    with pytest.raises(EngineError, match=r"20 rows in a row .* rank 1 is gone"):
        run(file, tmp_path / "out.jsonl", engine=engine)
    report = run(file, tmp_path / "out.jsonl")
    assert (report.num_skipped, report.num_completed) == (0, 60)


def test_a_poison_row_is_sent_once_and_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.batch.loop._FIRST_PAUSE_S", 0.001)
    file, output = _write(tmp_path / "in.jsonl", _plain(30)), tmp_path / "out.jsonl"
    poison = PoisonRequest(request_id="r", crashes=3, reason="a bug")
    engine = _FailsAtFirst(poison, times=10**9)
    report = run(file, output, engine=engine)
    assert (report.num_failed, len(engine.requests)) == (30, 30)
    assert {r["error"]["code"] for r in _records(errors_path_of(output))} == {"poison_request"}  # type: ignore[index]
    second_run = run(file, output)
    assert (second_run.num_skipped, second_run.num_failed_before) == (30, 30)


class _FailsAtFirst(ToyEngine):
    """Refuses so many requests, or only those with a certain letter in the prompt."""

    def __init__(self, error: Exception, *, times: int, only: str = "") -> None:
        super().__init__(vocab_size=128)
        self._error = error
        self._num_left = times
        self._only = only

    def stream(self, request):  # type: ignore[no-untyped-def]
        hit = self._only in bytes(request.prompt).decode()
        self._num_left -= hit
        self.refusal = self._error if hit and self._num_left >= 0 else None
        return super().stream(request)


def test_rows_that_ask_for_the_impossible_are_errors_of_their_own(tmp_path: Path) -> None:
    deep = '{"id": "deep", "prompt": "x", "logit_bias": ' + "[" * 300 + "]" * 300 + "}"
    lines = [
        '{"id": "good", "prompt": "x", "max_tokens": 4}',
        '{"id": "endless", "prompt": "x", "max_tokens": 1e999}',
        '{"id": "long", "prompt": "x", "max_tokens": ' + "9" * 400 + "}",
        '{"id": "none", "prompt": "x", "max_tokens": NaN}',
        deep,
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(lines))
    report = run(file, tmp_path / "out.jsonl")
    assert (report.num_completed, report.num_failed) == (1, 4)
    errors = {r["custom_id"]: r["error"] for r in _records(tmp_path / "out.errors.jsonl")}
    assert any("nested deeper than 100 levels" in error["message"] for error in errors.values())  # type: ignore[index]


def test_too_many_failed_rows_end_the_job(tmp_path: Path) -> None:
    file = _write(tmp_path / "in.jsonl", [*_plain(4), *({"id": f"bad{i}"} for i in range(9))])
    with pytest.raises(TooManyErrors, match="3 rows have failed, more than --max-errors 2"):
        run(file, tmp_path / "out.jsonl", options=replace(QUIET, max_errors=2))
    report = run(file, tmp_path / "out.jsonl", options=replace(QUIET, max_errors=9))
    assert report.num_skipped + report.num_completed + report.num_failed == 13


def test_a_job_in_its_own_folder_can_be_continued(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", _plain(5))
    for num_skipped in (0, 5):
        assert run(tmp_path, tmp_path / "out.jsonl").num_skipped == num_skipped


def test_a_refused_input_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no such file"):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_an_execution_that_ends_early_is_no_success(rows: Path, tmp_path: Path) -> None:
    class Early:
        usage = Usage()
        max_in_flight = 1

        async def run(self, rows: Iterator[Row], take: TakeResult) -> None:
            return

    @asynccontextmanager
    async def execution(options: BatchOptions, num_rows: int) -> AsyncIterator[Early]:
        yield Early()

    job = run_batch(str(rows), str(tmp_path / "out.jsonl"), execution=execution, model=MODEL)
    with pytest.raises(EngineError, match="20 of 20 rows have no result"):
        asyncio.run(job)


def test_a_dry_run_says_what_there_is_to_do_and_changes_nothing(tmp_path: Path) -> None:
    rows = [*_plain(4), {"id": "bad"}, {"id": "long", "prompt": "x", "max_tokens": 100}]
    file, output = _write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    dry = replace(QUIET, recovery=Recovery(dry_run=True))
    before = sorted(tmp_path.iterdir())
    preview = run(file, output, options=dry).preview
    assert preview is not None
    assert (preview.num_rows, preview.num_invalid) == (6, 1)
    assert "bad: a row needs either prompt or messages" in preview.problems[0]
    assert preview.max_tokens >= 100
    assert sorted(tmp_path.iterdir()) == before
    run(file, output)
    content = output.read_bytes()
    output.write_bytes(content + b'{"id":"batch_req_')  # as after a power cut
    report = run(file, output, options=dry)
    assert report.preview is not None
    assert (report.num_skipped, report.preview.num_rows) == (6, 0)
    with pytest.raises(ConfigError, match="seed"):
        run(file, output, options=replace(dry, seed=1))
    retried = run(
        file, output, options=replace(QUIET, recovery=Recovery(dry_run=True, retry_errors=True))
    )
    assert retried.preview is not None
    assert retried.preview.num_rows == 1
    assert output.read_bytes() == content + b'{"id":"batch_req_'


def test_a_dry_run_makes_no_folder(tmp_path: Path) -> None:
    file = _write(tmp_path / "in.jsonl", _plain(4))
    dry = replace(QUIET, recovery=Recovery(dry_run=True))
    run(file, tmp_path / "parts.parquet", options=dry)
    assert sorted(tmp_path.iterdir()) == [file]
