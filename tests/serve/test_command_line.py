"""`eesd` as a person starts it, and as it is stopped."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from psutil import Process

from serve_app.service.local_ray import _LONGEST_FOLDER
from serve_app.service.watchdog import running_after
from tests.support.running import descendants, free_port
from tests.support.served import command, wait_for_line
from tests.support.shadows import write_shadows

_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A local Ray is at 127.0.0.1 for its own drivers too."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with the longest path in which Ray can have its folder."""
    prefix = "eesd-test-".ljust(_LONGEST_FOLDER - len("/tmp/") - 8, "x")
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp") as folder:
        assert len(folder) == _LONGEST_FOLDER
        yield Path(folder)


def _within(folder: Path) -> Mapping[str, str]:
    """Environment of a command that has its files in this folder."""
    return {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}


def _answers(url: str, model: str = "tiny") -> bool:
    body = {"model": model, "prompt": "the cat", "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def test_serve_says_when_it_is_ready_and_a_signal_leaves_nothing_behind(
    tiny_service: Path, folder: Path, tmp_path: Path
) -> None:
    """Also where the working directory, and PYTHONPATH, have files of the same names as ours."""
    port = free_port()
    words = ("serve", "--model", str(tiny_service), "--port", str(port))
    env = {**_within(folder), "PYTHONPATH": str(write_shadows(tmp_path))}
    with command(*words, env=env, cwd=tmp_path) as (process, lines):
        wait_for_line(lines, "Ctrl-C stops", process)
        url = f"http://127.0.0.1:{port}"
        assert any(f"curl {url}/v1/chat/completions" in line for line in lines)
        assert _answers(url)
        _operate(port, tiny_service / "exit_head", folder)
        family = descendants(process.pid)
        assert len(family) > 5  # Ray, Serve and the actors
        # Serve has no setting for this one, which asks for the token like Ray's own.
        assert _listening_beyond_loopback(family) <= {"ray::ServeReplica"}
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0
    assert not running_after(family, wait_s=1.0)
    assert not list(folder.iterdir())
    assert "stopped: no process is left" in "".join(lines)
    assert "Traceback" not in "".join(lines)


def _listening_beyond_loopback(family: set[psutil.Process]) -> set[str]:
    """Returns the names of the processes that other hosts can reach."""
    return {
        process.cmdline()[0].rsplit(":eesd", 1)[0]
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
        and not connection.laddr.ip.removeprefix("::ffff:").startswith("127.")
    }


_ENDS_OF_RAY = {
    "raylet": "the raylet of the local Ray has died",
    "gcs_server": "has not answered for 5 s: without GCS fault tolerance the service has ended",
}


@pytest.mark.parametrize(
    "end",
    [
        "kill -9",
        "gcs_server",
        pytest.param("raylet", marks=pytest.mark.nightly),
        pytest.param("serve.shutdown()", marks=pytest.mark.nightly),
    ],
)
def test_however_serve_ends_its_logs_are_all_that_is_left(
    end: str, tiny_service: Path, folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    words = ("serve", "--model", str(tiny_service), "--port", str(port))
    words = (*words, "--log-folder", str(tmp_path / "logs"), "--set", "recovery.drain_s=5")
    fewer = ("num_ingresses=1", "recovery.spares.draft=0", "recovery.spares.verify=0")
    words = (*words, *(word for setting in fewer for word in ("--set", setting)))
    secret = {"EESD_API_KEY": "s3cret"}
    with command(*words, env={**_within(folder), **secret}) as (process, lines):
        wait_for_line(lines, "Ctrl-C stops", process)
        (session,) = (child for child in folder.iterdir() if (child / "r").exists())
        (logs,) = (tmp_path / "logs").iterdir()
        assert f"(logs: {logs})" in lines[0]
        assert (logs / "ray" / "raylet.out").exists()  # while it runs, too
        assert stat.S_IMODE(session.stat().st_mode) == 0o700
        family = descendants(process.pid)
        assert len(family) > 5
        assert [
            member.name() for member in family if secret.items() <= member.environ().items()
        ] == []
        if end == "kill -9":
            # A process that hangs does not notice that the others are gone.
            _find(family, "RankActor").suspend()
            process.kill()
            assert not running_after(family, wait_s=30.0)
        elif end in _ENDS_OF_RAY:
            (victim,) = (process for process in family if process.name() == end)
            victim.kill()
            assert process.wait(60.0) == 1
            assert not running_after(family, wait_s=1.0)
            assert [line for line in lines if line.startswith("eesd: ")] == lines[-1:]
            assert _ENDS_OF_RAY[end] in lines[-1]
        else:
            with _shutting_down_serve(folder, port):
                wait_for_line(lines, "was removed, or Serve was shut down", process)
                assert process.wait(30.0) == 0
            assert not running_after(family, wait_s=1.0)
    assert not list(folder.iterdir())
    assert (logs / "ray" / "raylet.out").stat().st_size > 0
    assert list((logs / "ray" / "serve").glob("replica_eesd_Pipeline_*"))
    assert not (logs / "ray").is_symlink()
    assert "Traceback" not in "".join(lines)


def _find(family: set[Process], name: str) -> Process:
    (process,) = (process for process in family if name in " ".join(process.cmdline()))
    return process


@contextmanager
def _shutting_down_serve(folder: Path, port: int) -> Iterator[None]:
    """As `serve shutdown` does, which needs the dashboard that a local Ray has not."""
    (file,) = folder.glob(f"*/service-{port}.json")
    connection = json.loads(file.read_text())
    code = (
        "import ray, sys; from ray import serve; ray.init(sys.argv[1], log_to_driver=False); "
        "serve.shutdown()"
    )
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": connection["token"], **_ON_LOOPBACK}
    with subprocess.Popen(
        [sys.executable, "-c", code, connection["address"]],
        env={**os.environ, **token},
        stderr=subprocess.DEVNULL,
    ) as client:
        yield
        client.kill()  # it would wait for Ray, which is gone


_CLUSTER = """
import os, sys
from serve_app.service.environment import prepare_for_local_ray
prepare_for_local_ray()
import ray
from serve_app.config import service_config
from serve_app.service.local_ray import local_ray
config = service_config({"engine": {"model": {"path": sys.argv[1]}}})
with local_ray(config, shows_logs=False, min_cpus=4):
    print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
"""


@contextmanager
def _cluster(model: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Address of a running Ray, and the environment of the commands that may use it."""
    with subprocess.Popen(
        [sys.executable, "-c", _CLUSTER, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address, token = process.stdout.readline().split()
        yield address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **_ON_LOOPBACK}


@pytest.mark.timeout(400)
def test_on_a_cluster_the_service_stays_is_updated_and_is_removed_by_stop(
    tiny_service: Path,
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with _cluster(tiny_service) as (address, env):
        words = ("serve", "--address", address, "--model", str(tiny_service), "--port", str(port))
        with command(*words, env=env) as (process, lines):
            wait_for_line(lines, "Try it", process)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        assert f"`eesd stop --address {address}` stops it" in lines[-1]
        assert _answers(url)
        with command(*words, "--name", "renamed", env=env) as (process, lines):
            wait_for_line(lines, "Try it", process)
            assert "updating eesd, which runs there" in "".join(lines)
            process.kill()
        assert _answers(url, "renamed")
        assert not _answers(url)
        stopped = _run("stop", "--address", address, env=env)
        assert (stopped.returncode, stopped.stdout) == (0, "stopped: eesd\n")
        assert httpx.get(f"{url}/health", timeout=60).status_code == 404
        second_stop = _run("stop", "--address", address, env=env)
        assert second_stop.returncode == 2
        assert (
            f"no application 'eesd' in the cluster at {address}, which has none"
            in second_stop.stderr
        )


def _operate(port: int, head: Path, folder: Path) -> None:
    """What the same user may do from another process, but no client over HTTP."""
    at = ("--port", str(port))
    env = _within(folder)
    pinned = _run("controllers", "pin", *at, env=env)
    assert pinned.returncode == 0, pinned.stderr
    promoted = _run("controllers", "promote", str(head), *at, "--json", env=env)
    assert promoted.returncode == 0, promoted.stderr
    shown = _run("controllers", *at, env=env).stdout
    assert "pools       pinned" in shown
    assert json.loads(promoted.stdout)[0]["sha256"][:12] in shown


@pytest.mark.parametrize(
    "log", ["gcs_server.out", "python-core-driver-*"], ids=["Ray starts", "Serve starts"]
)
def test_a_signal_while_it_starts_leaves_nothing_behind_either(
    log: str, tiny_service: Path, folder: Path
) -> None:
    words = ("serve", "--model", str(tiny_service), "--port", str(free_port()))
    with command(*words, env=_within(folder)) as (process, lines):
        wait_for_line(lines, "starting", process)
        deadline = time.monotonic() + 60.0
        while not list(folder.glob(f"*/r/session_latest/logs/{log}")):
            assert time.monotonic() < deadline, "Ray writes no such log"
            time.sleep(0.02)
        time.sleep(0.5)  # Ray's core, which writes this log, installs a handler for a moment
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, "".join(lines)
    assert not running_after(family, wait_s=1.0)
    assert not list(folder.iterdir())
    assert "Traceback" not in "".join(lines)


def _run(*words: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "serve_app.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=None if env is None else {**os.environ, **env},
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
    ("words", "message"),
    [
        (("serve", "--model", "/nowhere"), "/nowhere: found no such folder"),
        (("serve", "--verify-tp", "5"), "5 tensor-parallel ranks cannot share evenly"),
        (("serve", "--set", "engine.model.colour=red"), "engine.model.colour: unknown key"),
        (("generate", "hello", "--config", "/nowhere.yaml"), "/nowhere.yaml: No such file"),
        (("serve", "--set", "port"), "--set port: expected KEY=VALUE"),
    ],
)
def test_what_a_person_got_wrong_is_one_line_and_status_2(
    words: tuple[str, ...], message: str
) -> None:
    result = _run(*words)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_named(tiny_service: Path) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        result = _run("serve", "--model", str(tiny_service), "--port", str(port))
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


_OTHER_VERSION = """
import sys, ray
ray.__version__ = "1.0.0"
from serve_app.cli.main import main
sys.exit(main(["stop", "--address", sys.argv[1]]))
"""


def test_a_cluster_of_another_version_is_named_in_one_line(ray_port: int) -> None:
    del ray_port  # Ray runs
    address = ray.get_runtime_context().gcs_address
    result = subprocess.run(
        [sys.executable, "-c", _OTHER_VERSION, address],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert f"no Ray cluster at {address}: Version mismatch: The cluster" in result.stderr
    assert "1.0.0" in result.stderr
    assert result.stderr.count("\n") == 1


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
