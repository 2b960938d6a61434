"""`eesd batch` as a person starts it. Oracle: the same job in one process, undisturbed."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from psutil import Process

from serve_app.cli.main import main
from serve_app.service.watchdog import running_after
from tests.support.running import descendants, free_port, until

NUM_ROWS = 120
_ENGINE = "ray::BatchEngine"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("batch") / "rows.jsonl"
    rows = [
        {"prompt": f"the dog {i % 50} sat on", "max_tokens": 16 + i % 40, "temperature": 0.8}
        for i in range(NUM_ROWS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def expected(rows: Path, tiny_service: Path) -> dict[str, str]:
    output = rows.parent / "expected.jsonl"
    assert main(["batch", str(rows), str(output), *_options(tiny_service), "--in-process"]) == 0
    return _texts(output)


def _options(model: Path) -> tuple[str, ...]:
    engine = ("--model", str(model), "--dtype", "float32", "--set", "engine.parallel.num_threads=1")
    return (*engine, "--quiet", "--concurrency", "16")


def _texts(output: Path) -> dict[str, str]:
    """Returns texts by id; fails where an id is there twice."""
    records = [json.loads(line) for line in output.read_bytes().splitlines(keepends=True)]
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}
    assert len(texts) == len(records)
    return texts


@contextmanager
def _job(
    rows: Path, output: Path, model: Path, *, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", str(rows), str(output)]
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [*command, *_options(model)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": folder, **(env or {})},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _wait_for_rows(output: Path, number: int, process: "subprocess.Popen[str]") -> None:
    def is_there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return output.exists() and output.read_bytes().count(b"\n") >= number

    until(is_there, timeout_s=120)


def _engines(process: "subprocess.Popen[str]") -> list[Process]:
    return [
        child
        for child in Process(process.pid).children(recursive=True)
        if any(_ENGINE in word for word in child.cmdline())
    ]


def test_killed_engines_cost_nothing_but_time(
    rows: Path, expected: dict[str, str], tiny_service: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with _job(rows, output, tiny_service) as process:
        for number in (10, 60):
            _wait_for_rows(output, number, process)
            (engine,) = until(lambda: _engines(process))
            engine.kill()
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert f"{NUM_ROWS} rows: 0 done before, {NUM_ROWS} answered, 0 failed" in text
    assert _texts(output) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_job_leaves_no_process_and_is_continued(
    rows: Path, expected: dict[str, str], tiny_service: Path, tmp_path: Path, number: int
) -> None:
    output = tmp_path / "out.jsonl"
    with _job(rows, output, tiny_service) as process:
        _wait_for_rows(output, 10, process)
        family = descendants(process.pid)
        began_s = time.monotonic()
        process.send_signal(number)
        text, _ = process.communicate(timeout=30)
        if number != signal.SIGKILL:
            assert process.returncode == 130, text
            assert time.monotonic() - began_s < 15.0
            assert "stopped; finished rows are kept: the same command continues" in text
        assert not running_after(family, wait_s=30.0)
    num_done = output.read_bytes().count(b"\n")
    assert 10 <= num_done < NUM_ROWS
    command = ["batch", str(rows), str(output), *_options(tiny_service)]
    assert main([*command, "--in-process"]) == 0  # the same job, wherever it runs
    assert _texts(output) == expected


def test_a_job_is_submitted_to_a_cluster(
    rows: Path, expected: dict[str, str], tiny_service: Path, tmp_path: Path
) -> None:
    metrics_port = free_port()
    with _cluster(metrics_port) as (dashboard, env):
        command = [str(Path(sys.executable).with_name("ray")), "job", "submit"]
        command += ["--address", f"http://127.0.0.1:{dashboard}", "--"]
        command += [sys.executable, "-m", "serve_app.cli.main", "batch", str(rows)]
        command += [str(tmp_path / "parts.parquet"), *_options(tiny_service), "--address", "auto"]
        command += ["--set", f"telemetry.trace_folder={tmp_path / 'traces'}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        metrics = until(lambda: _metrics(metrics_port), timeout_s=30)
    assert metrics["ray_eesd_batch_generation_tokens_total"] > NUM_ROWS
    assert f"{NUM_ROWS} rows: 0 done before, {NUM_ROWS} answered, 0 failed" in done.stdout
    import pyarrow.dataset as ds

    files = sorted(map(str, (tmp_path / "parts.parquet").glob("part-*.parquet")))
    table = ds.dataset(files).to_table().to_pylist()
    assert {row["custom_id"]: row["generated_text"] for row in table} == expected
    spans = "".join(file.read_text() for file in (tmp_path / "traces").glob("batch-*.jsonl"))
    for row in table:  # a trace for each, with its rounds
        assert json.loads(row["response"])["id"] in spans
    assert "eesd.round" in spans


def _metrics(port: int) -> dict[str, float]:
    """Returns the counts of a job; empty as long as its last rows are missing."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    values = re.findall(r"^(ray_eesd_batch_\w+){.*} ([\d.]+)$", text, re.MULTILINE)
    metrics = {name: float(value) for name, value in values}
    return metrics if metrics.get("ray_eesd_batch_rows_total") == NUM_ROWS else {}


@contextmanager
def _cluster(metrics_port: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Gives the dashboard's port of a head with jobs, and the environment of its users."""
    # The node's agent, which starts jobs, has a fixed port by default: another cluster may hold it.
    port, dashboard, agent = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        env = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_metrics_collection": "1",
            "RAY_metrics_report_interval_ms": "500",
        }
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
        command += ["--num-cpus", "3", "--port", str(port), "--dashboard-port", str(dashboard)]
        command += ["--temp-dir", folder, "--object-store-memory", str(100 * 2**20)]
        command += ["--node-ip-address", "127.0.0.1", "--include-dashboard", "true"]
        command += ["--dashboard-agent-listen-port", str(agent)]
        command += ["--metrics-export-port", str(metrics_port)]
        with subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as head:
            try:
                until(lambda: _listens(dashboard) and _listens(agent), timeout_s=90)
                yield dashboard, env
            finally:
                family = descendants(head.pid)
                for process in [Process(head.pid), *family]:
                    process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
