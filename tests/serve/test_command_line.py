"""`eesd` as a person starts it, and as it is stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.session.processes import descendants, running_after
from tests.support.running import free_port


@contextmanager
def _started(*words: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """The process, and its lines as they come."""
    process = subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(10)
        if process.stdout is not None:
            process.stdout.close()


def _wait_for_line(lines: list[str], word: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 200
    while not any(word in line for line in lines):
        assert process.poll() is None, f"ended with {process.returncode}: {''.join(lines)}"
        assert time.monotonic() < deadline, f"no '{word}' in: {''.join(lines)}"
        time.sleep(0.1)


def _sessions() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("eesd-")}


def test_serve_says_when_it_is_ready_and_a_signal_leaves_nothing_behind(tiny_service: Path) -> None:
    port = free_port()
    before = _sessions()
    with _started("serve", "--model", str(tiny_service), "--port", str(port)) as (process, lines):
        _wait_for_line(lines, "Ctrl-C stops", process)
        url = f"http://127.0.0.1:{port}"
        assert any(f"curl {url}/v1/chat/completions" in line for line in lines)
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        _operate(port, tiny_service / "exit_head")
        family = descendants(process.pid)
        assert len(family) > 5  # Ray, Serve and the actors
        # Serve has no setting for this one, which asks for the token like Ray's own.
        assert _listening_beyond_loopback(family) <= {"ray::ServeReplica"}
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0
    assert not running_after(family, wait_s=1.0)
    assert _sessions() <= before
    assert "stopped: no process is left" in "".join(lines)
    assert "Traceback" not in "".join(lines)


def _listening_beyond_loopback(family: set[psutil.Process]) -> set[str]:
    """Returns the names of the processes that other hosts can reach."""
    return {
        process.cmdline()[0].rsplit(":eesd", 1)[0]
        for process in family
        for found in process.net_connections("inet")
        if found.status == psutil.CONN_LISTEN
        and not found.laddr.ip.removeprefix("::ffff:").startswith("127.")
    }


def _operate(port: int, head: Path) -> None:
    """What the same user may do from another process, but no client over HTTP."""
    at = ("--port", str(port))
    pinned = _run("controllers", "pin", *at)
    assert pinned.returncode == 0, pinned.stderr
    promoted = _run("controllers", "promote", str(head), *at, "--json")
    assert promoted.returncode == 0, promoted.stderr
    shown = _run("controllers", *at).stdout
    assert "pools       pinned" in shown
    assert json.loads(promoted.stdout)[0]["sha256"][:12] in shown


def test_a_signal_while_it_starts_leaves_nothing_behind_either(tiny_service: Path) -> None:
    before = _sessions()
    words = ("serve", "--model", str(tiny_service), "--port", str(free_port()))
    with _started(*words) as (process, lines):
        _wait_for_line(lines, "starting", process)
        time.sleep(3.0)
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert not running_after(family, wait_s=1.0)
    assert _sessions() <= before
    assert "Traceback" not in "".join(lines)


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "serve_app.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_generate_gives_the_same_text_with_and_without_speculation(tiny_service: Path) -> None:
    words = ("generate", "the quick", "--model", str(tiny_service), "--dtype", "float32", "--raw")
    words = (*words, "--max-tokens", "48", "--temperature", "0.5", "--seed", "5")
    drafted = _run(*words, "--color", "always", "--controller", "fixed")
    plain = _run(*words, "--no-speculation")
    assert drafted.returncode == plain.returncode == 0
    coloured = drafted.stdout
    assert coloured.replace("\033[32m", "").replace("\033[0m", "") == plain.stdout
    assert "\033[32m" in coloured
    assert " tokens in " in drafted.stderr
    assert "drafted tokens accepted" in drafted.stderr
    assert "nothing drafted" in plain.stderr


def test_batch_answers_every_row_once_and_a_second_run_has_nothing_to_do(
    tiny_service: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "in.jsonl"
    bodies = [{"prompt": f"row {i}", "max_tokens": 6} for i in range(5)] + [{"prompt": 3.5}]
    rows.write_text(
        "".join(
            json.dumps(
                {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            )
            + "\n"
            for i, body in enumerate(bodies)
        )
    )
    out = tmp_path / "out.jsonl"
    words = ("batch", str(rows), str(out), "--model", str(tiny_service), "--quiet")
    first, second = _run(*words), _run(*words)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    answered = {r["custom_id"] for r in records if r["error"] is None}
    assert answered == {f"r{i}" for i in range(5)}
    assert "5 answered, 1 failed" in first.stdout
    assert "6 done before, 0 answered" in second.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--model", "/nowhere"), "/nowhere: found no config.json"),
        (("serve", "--set", "engine.model.colour=red"), "engine.model.colour: unknown key"),
        (("generate", "hello", "--config", "/nowhere.yaml"), "/nowhere.yaml: No such file"),
        (("serve", "--set", "port"), "--set port: expected KEY=VALUE"),
    ],
)
def test_what_a_person_got_wrong_is_one_line_and_status_2(
    words: tuple[str, ...], said: str
) -> None:
    result = _run(*words)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_named(tiny_service: Path) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        result = _run("serve", "--model", str(tiny_service), "--port", str(port))
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bench_exact_finds_nothing_in_one_process_nor_over_actors(tiny_service: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "serve_app.cli.main", "bench", "exact"),
            *("--model", str(tiny_service), "--tokens", "400", "--topology", "2x2", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["mismatches"] == 0
    ranks = {(case["verify_ranks"], case["draft_ranks"]) for case in report["cases"]}
    assert ranks == {(0, 1), (2, 2)}
