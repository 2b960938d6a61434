"""Log lines as text and as JSON."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from eesd_dist.telemetry.logs import BoundedStream, JsonLines, TextLines, current_request


def record(message: str, *args: object, error: bool = False) -> logging.LogRecord:
    exc_info = sys.exc_info() if error else None
    return logging.LogRecord("eesd_dist.x", logging.INFO, "x.py", 1, message, args, exc_info)


def test_keys_of_a_message_are_fields_with_their_values() -> None:
    line = json.loads(
        JsonLines().format(
            record(
                "joined: pipeline=%s epoch=%d after_s=%.2f reason=%r", "p 1", 3, 0.5, OSError("x")
            )
        )
    )
    assert line["event"] == "joined"
    assert (line["pipeline"], line["epoch"], line["after_s"]) == ("p 1", 3, 0.5)
    assert line["reason"] == "x"
    assert line["message"] == "joined: pipeline=p 1 epoch=3 after_s=0.50 reason=OSError('x')"
    assert (line["level"], line["logger"]) == ("INFO", "eesd_dist.x")
    assert line["time"].endswith("+00:00")
    assert "request" not in line
    assert json.loads(JsonLines().format(record("a: x=%f", float("nan"))))["x"] == "nan"


@pytest.mark.parametrize(
    ("message", "args"),
    [("nothing to fill in: a=b", ()), ("%s", ("text",)), ("%(a)s", ({"a": 1},)), ("100 %", ())],
)
def test_other_messages_stay_readable(message: str, args: tuple[object, ...]) -> None:
    log_record = record(message, *args)
    line = json.loads(JsonLines().format(log_record))
    assert line["message"] == log_record.getMessage()


def test_a_value_cannot_forge_a_line_or_a_field() -> None:
    text = 'x level=ERROR\n{"level": "ERROR"}'
    written = JsonLines().format(record("request refused: reason=%s", text))
    assert "\n" not in written
    assert json.loads(written)["level"] == "INFO"
    assert json.loads(JsonLines().format(record("a: level=%s", "HIGH")))["level"] == "INFO"


@pytest.mark.parametrize("end", ["\n", "\r", "\x1b[2K", "\x85", "\u2028"])
def test_a_value_cannot_forge_a_line_of_text(end: str) -> None:
    written = TextLines().format(record("stream resumed: request=%s", f"a{end}ERROR forged"))
    assert len(written.splitlines()) == 1
    assert written.isprintable()
    assert "ERROR forged" in written


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        written = TextLines().format(record("loop broke: loop=%s", "a", error=True))
    assert len(written.splitlines()) > 2


def test_lines_name_the_request_of_their_task() -> None:
    token = current_request.set("r-1")
    try:
        assert json.loads(JsonLines().format(record("client left a stream")))["request"] == "r-1"
        assert TextLines().format(record("client left a stream")).endswith(" request=r-1")
        other = record("stream resumed: request=%s kept_by=%s", "r-2", "p")
        assert json.loads(JsonLines().format(other))["request"] == "r-2"
        assert "r-1" not in TextLines().format(other)
    finally:
        current_request.reset(token)
    assert "request=" not in TextLines().format(record("client left a stream"))


def test_an_error_has_its_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = json.loads(JsonLines().format(record("loop broke: loop=%s", "a", error=True)))
    assert line["error"].endswith("ValueError: broken")


def test_a_file_of_log_lines_begins_again_at_a_size_and_its_last_part_is_kept(
    tmp_path: Path,
) -> None:
    file = tmp_path / "worker.err"
    with file.open("w") as stream:
        handler = BoundedStream(stream, max_bytes=10_000)
        for number in range(5000):
            handler.emit(record("line %05d: of no other interest", number))
            assert file.stat().st_size <= 10_100
        stream.write("a child's line\n")
    before, after = (tmp_path / "worker.err.1").read_text(), file.read_text()
    assert b"\0" not in (before + after).encode()
    numbers = [int(line[5:10]) for line in (before + after).splitlines()[:-1]]
    assert numbers == list(range(numbers[0], 5000))
    assert len(numbers) > 200
    assert after.endswith("a child's line\n")


def test_a_stream_that_is_no_file_of_its_own_is_written_as_it_is() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        handler = BoundedStream(stream, max_bytes=10)
        for number in range(100):
            handler.emit(record("line %d", number))
    with os.fdopen(reader) as lines:
        assert len(lines.readlines()) == 100
