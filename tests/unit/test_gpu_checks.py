"""The checks of tests/gpu find planted errors, and run from a copied folder without Ray."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.sampling.processors import processed
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.types import SamplingParams
from tests.gpu import test_exactness, test_noise, test_spans
from tests.gpu.ranks import exchange, run_ranks
from tests.gpu.shapes import Width
from tests.gpu.test_attention import AttendedText
from tests.gpu.test_products import first_difference

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
COPIED = ("eesd_dist", "infra", "serve_app/demo_model", "tests", "pyproject.toml")
ABSENT = (
    "deepspeed",
    "fastapi",
    "openai",
    "opentelemetry",
    "prometheus_client",
    "ray",
    "starlette",
    "uvicorn",
)
BLOCKER = f"""
import sys

class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, _Absent())
"""


def test_a_product_that_sees_its_neighbours_is_found() -> None:
    weight_OI = torch.randn(24, 16)
    x_MI = torch.randn(60, 16)

    def by_row(x: Tensor) -> Tensor:
        return torch.stack([weight_OI @ row for row in x])

    def from_32_rows_on(x: Tensor) -> Tensor:
        return by_row(x) if len(x) < 32 else by_row(x) * (1 + 2e-7)

    assert first_difference(by_row, x_MI) is None
    assert first_difference(from_32_rows_on, x_MI) == "in rows [0, 33)"  # no call has 32


def test_attention_that_depends_on_the_number_of_rows_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = Width(hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=1, vocab=1)
    text = AttendedText(width, 500, dtype=torch.float32, device=CPU)
    assert text.first_difference() is None
    attend = LayerPages.attend

    def otherwise_at_long_contexts(pages: LayerPages, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        mixed_TD = attend(pages, rows, heads_THE)
        is_long_T = rows.positions > 320
        return torch.where(
            is_long_T[:, None] & (rows.num_rows > 20), mixed_TD * 1.0000002, mixed_TD
        )

    monkeypatch.setattr(LayerPages, "attend", otherwise_at_long_contexts)
    difference = text.first_difference()
    assert difference is not None
    assert int(difference.split()[-1]) > 300


def test_noise_with_one_other_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gumbel = test_noise.gumbel

    def one_bit(keys: list[int], ids_V: Tensor) -> Tensor:
        noise_SV = gumbel(keys, ids_V)
        if ids_V.dtype == torch.int64:
            noise_SV.view(torch.int32)[-1, 77] ^= 1
        return noise_SV

    monkeypatch.setattr(test_noise, "gumbel", one_bit)
    with pytest.raises(AssertionError, match="int64"):
        test_noise.test_noise_has_the_bits_of_the_cpu(2_000, CPU, is_small=True)


def test_a_filter_that_depends_on_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wider_in_a_single_row(logits_SV: Tensor, *options: Any) -> Tensor:
        scores_SV = processed(logits_SV, *options)
        return scores_SV if len(logits_SV) > 1 else scores_SV.nan_to_num(neginf=0.0)

    check = test_noise.test_filters_keep_the_tokens_of_the_cpu_in_any_batch
    params, logits_SV = SamplingParams(top_k=5), torch.randn(3, 500)
    check(params, logits_SV, CPU)
    monkeypatch.setattr(test_noise, "processed", wider_in_a_single_row)
    with pytest.raises(AssertionError, match="a single row"):
        check(params, logits_SV, CPU)


def test_logits_with_a_small_error_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logits_of = test_spans._logits

    def wrong_in_chunks(stages: Any, tokens_T: Tensor, counts: list[int]) -> Tensor:
        return logits_of(stages, tokens_T, counts) * (1.0001 if len(counts) > 1 else 1.0)

    def check() -> None:
        test_spans.test_logits_are_close_to_those_of_the_cpu_and_transformers(
            "llama", "float32", tmp_path, CPU, True, tmp_path, lambda name, figures: None
        )

    check()
    monkeypatch.setattr(test_spans, "_logits", wrong_in_chunks)
    with pytest.raises(AssertionError):
        check()


def test_nan_is_no_small_error() -> None:
    error = test_spans.relative_error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]))
    assert not error <= test_spans.FLOAT32_BOUND


@pytest.mark.parametrize(
    ("tokens", "mismatches", "status"), [(500, 2, 1), (0, 0, 0), (500, 0, 130)]
)
def test_texts_that_differ_or_are_not_compared_are_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tokens: int,
    mismatches: int,
    status: int,
) -> None:
    report = json.dumps({"tokens": tokens, "mismatches": mismatches, "failures": []})

    def fuzz(options: object) -> int:
        sys.stdout.write(f"progress\n{report}\n")
        return status

    monkeypatch.setattr(test_exactness, "main", fuzz)
    with pytest.raises(AssertionError):
        test_exactness.test_texts_are_those_of_plain_decoding(
            "float32", tmp_path, CPU, True, tmp_path, capsys, lambda name, figure: None
        )


def crash(group: ProcessGroup, device: torch.device) -> None:
    os._exit(7)


def hang(group: ProcessGroup, device: torch.device) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("job", "device", "limit_s", "reason"),
    [
        (crash, "cpu", 60.0, "ended without a report"),
        (hang, "cpu", 0.5, "did not end in time"),
        (exchange, "cuda:0", 60.0, "rank 0: "),
    ],
)
def test_a_rank_that_crashes_hangs_or_fails_is_found(
    job: Any, device: str, limit_s: float, reason: str
) -> None:
    if device != "cpu" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(AssertionError, match=reason):
        run_ranks(job, [device], limit_s=limit_s)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "wheels")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKER)
    return folder


def run_check(folder: Path, *options: str) -> "tuple[int, dict[str, str], dict[str, Any]]":
    """Returns the exit status, the outcome of each test, and the machine, as the XML has them."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(folder.parent / "site"),
    }
    blocked = subprocess.run([sys.executable, "-c", "import ray"], env=environment)
    assert blocked.returncode == 1
    done = subprocess.run(
        [str(folder / "infra" / "gpu" / "check.sh"), "--device", "cpu", *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (folder / "gpu-check.xml").is_file(), done.stdout + done.stderr
    suite = ElementTree.parse(folder / "gpu-check.xml").getroot()[0]
    machine = suite.find("properties/property[@name='machine']")
    assert machine is not None
    outcomes = {
        case.attrib["name"]: next((x.tag for x in case if x.tag != "properties"), "passed")
        for case in suite.iter("testcase")
    }
    return done.returncode, outcomes, json.loads(machine.attrib["value"])


def test_the_check_of_a_copied_folder_finds_a_planted_error(copied: Path) -> None:
    """Makes one bit of the noise depend on the type of the token ids."""
    with (copied / "eesd_dist" / "sampling" / "noise.py").open("a") as noise:
        noise.write(
            "_right = gumbel\n"
            "def gumbel(keys, ids):\n"
            "    noise_SV = _right(keys, ids)\n"
            "    if ids.element_size() == 8: noise_SV[0, 0] += 1e-6\n"
            "    return noise_SV\n"
        )
    status, outcomes, machine = run_check(copied, "-k", "noise or over_nccl")
    assert status == 1
    failures = {name for name, outcome in outcomes.items() if outcome == "failure"}
    assert failures == {"test_noise_has_the_bits_of_the_cpu"}
    assert outcomes["test_filters_keep_the_tokens_of_the_cpu_in_any_batch[top_p]"] == "passed"
    assert outcomes["test_ranks_sum_gather_and_broadcast_over_nccl"] == "skipped"
    assert machine["device"] == "cpu"
    assert "torch" in machine["versions"]
    assert machine["hardware"]["cpu_model"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_checks_of_a_copied_folder_pass(copied: Path) -> None:
    status, outcomes, _ = run_check(copied)
    assert (status, set(outcomes.values())) == (0, {"passed", "skipped"})
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert {
        "test_a_row_has_the_same_bits_alone_and_in_any_batch[model-bfloat16]",
        "test_a_row_attends_with_the_same_bits_in_any_batch[model-float32]",
        "test_logits_are_close_to_those_of_the_cpu_and_transformers[model-bfloat16]",
        "test_logits_of_the_exit_head_are_close_to_those_of_the_cpu[float32-5e-05]",
        "test_texts_are_those_of_plain_decoding[float32]",
        "test_ranks_sum_gather_and_broadcast_tensors_of_the_device_over_links",
        "test_pages_of_the_device_move_between_ranks_over_links",
        "test_rounds[8B layers]",
    } <= passed
