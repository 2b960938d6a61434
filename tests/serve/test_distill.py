"""`eesd distill run` from a target alone, killed midway, and finished by the same command."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from eesd_dist.control.calibrator import CALIBRATION_FILE
from eesd_dist.distill.features import MANIFEST_FILE, FeatureStore, identity_of, shard_name
from serve_app.cli.main import main
from serve_app.service.watchdog import running_after
from tests.support.running import descendants
from tests.support.tiny_service import write_tiny_service

WORDS = (
    *("--exit", "2", "--head", "own", "--minutes", "0.5", "--dtype", "float32"),
    *("--max-tokens", "24", "--max-length", "96", "--chunk-size", "2", "--passes", "3"),
    *("--held-out", "4", "--rows", "4", "--length", "48", "--workers", "1", "--top-k", "8"),
    *("--max-steps", "30"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without its head."""
    folder = write_tiny_service(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "exit_head").rename(folder.parent / "head")
    return folder


def _command(target: Path, out: Path, *more: str) -> list[str]:
    prompts = out.parent / "prompts.jsonl"
    rows = [{"class": f"c{n % 2}", "prompt": f"the dog {n} sat on the log"} for n in range(24)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ("--model", str(target), "--prompts", str(prompts), "--out", str(out))
    return [sys.executable, "-m", "serve_app.cli.main", "distill", "run", *files, *WORDS, *more]


def _kill_at_the_first_shard(command: list[str], features: Path) -> None:
    """Returns when none of its processes is left."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as scraps,
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": scraps}
        ) as process,
    ):
        deadline = time.monotonic() + 120
        while not list(features.glob("shard-*")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "no shard within two minutes"
            time.sleep(0.02)
        family = descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        assert not running_after(family, wait_s=30.0)


@pytest.mark.timeout(600)
def test_a_killed_run_is_finished_by_the_same_command(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    features = out / "features"
    _kill_at_the_first_shard(_command(target, out), features)
    early = {file.name: file.stat() for file in features.glob("shard-*")}
    assert not (features / MANIFEST_FILE).exists()

    done = subprocess.run(_command(target, out), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    store = FeatureStore.open(features, expect=identity_of(target))
    assert {shard_name(n) for n in range(len(store.manifest.shards))} >= early.keys()
    assert sum(1 for _ in store.sequences()) == store.num_sequences
    for name, before in early.items():  # not made a second time
        after = (features / name).stat()
        assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    head = out / "exit_2"
    assert json.loads((head / CALIBRATION_FILE).read_text())["num_judged"] > 0
    evaluation = json.loads((head / "evaluation.json").read_text())
    assert evaluation["speed"]["texts_unlike_plain"] == 0
    assert evaluation["provenance"]["hardware"]["num_cpus"] > 0
    assert (head / "reliability.png").read_bytes().startswith(b"\x89PNG")

    words = _command(target, out)[3:]
    assert main(words) == 0
    assert capsys.readouterr().err.count("done before") == 4
    assert main([*words, "--top-k", "9"]) == 2
    assert "was begun with top_k 8, now asked for 9" in capsys.readouterr().err
