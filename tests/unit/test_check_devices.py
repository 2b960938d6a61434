"""The check of devices finds questions outside of the backends, and says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "infra" / "check_devices.py"


def _check(root: Path, source: str, *, folder: str) -> "subprocess.CompletedProcess[str]":
    """Runs the check on one file."""
    file = root / folder / "rounds.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return subprocess.run(
        [sys.executable, str(_SCRIPT), str(root)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("source", "question"),
    [
        ("blocks = 1 if logits_SV.is_cuda else 8", "is_cuda"),
        ("if can_compile():\n    pass", "can_compile"),
        ("is_slow = device.type == 'cpu'", "type compared with 'cpu'"),
        ("while group.device.type != 'cuda':\n    pass", "type compared with 'cuda'"),
    ],
)
def test_a_question_for_a_device_is_refused_with_its_place_and_what_to_do(
    tmp_path: Path, source: str, question: str
) -> None:
    result = _check(tmp_path, source, folder="eesd_dist/model")
    assert result.returncode == 1
    assert result.stdout == f"eesd_dist/model/rounds.py:1: {question}\n"
    assert "found 1 questions for a device, 0 allowed: ask `devices.backend_of`" in result.stderr


def test_other_comparisons_pass(tmp_path: Path) -> None:
    source = "is_text = part.type == 'text'\nbackend = backend_of(logits_SV.device)\n"
    result = _check(tmp_path, source, folder="eesd_dist/model")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("folder", ["eesd_dist/backends/cuda", "eesd_dist/bench", "cluster"])
def test_backends_benchmarks_and_the_cluster_may_ask(tmp_path: Path, folder: str) -> None:
    result = _check(tmp_path, "width = 4 if x.is_cuda else 1", folder=folder)
    assert (result.returncode, result.stderr) == (0, "")
