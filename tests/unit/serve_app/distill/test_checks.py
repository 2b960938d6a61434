"""What is refused before anything is computed, and how what breaks is told."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.distill.collector import Recipe
from eesd_dist.distill.held_out import split_prompts
from eesd_dist.distill.rounds import Machine
from eesd_dist.errors import ConfigError
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import TokenId
from serve_app.cli import main as cli
from serve_app.config import BUNDLED_MODEL
from serve_app.distill import main as distill
from serve_app.distill.calibrate import CalibrateRequest
from serve_app.distill.collect import CollectRequest, recipe_of
from serve_app.distill.collect_job import ChunkWorker, Job, cause_of
from serve_app.distill.evaluate import EvaluateRequest

MACHINE = Machine(model=BUNDLED_MODEL, head=BUNDLED_MODEL / "exit_head")
PROMPTS = (Prompt(workload="w", tokens=(TokenId(5),)),)
COLLECT = CollectRequest(model=BUNDLED_MODEL, out=Path("out"), exits=(1,))
EVALUATE = EvaluateRequest(machine=MACHINE, prompts=PROMPTS)
CALIBRATE = CalibrateRequest(machine=MACHINE, prompts=PROMPTS)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: replace(EVALUATE, num_timed=0), "num_timed is 0: it must be above 0"),
        (lambda: replace(EVALUATE, temperatures=(0.0, -1.0)), r"temperatures are \[0.0, -1.0\]"),
        (lambda: replace(EVALUATE, temperatures=()), r"temperatures are \[\]"),
        (lambda: replace(CALIBRATE, temperatures=(-1.0,)), r"temperatures are \[-1.0\]"),
        (lambda: replace(CALIBRATE, max_tokens=0), "max_tokens is 0"),
        (lambda: replace(COLLECT, workers=0), "workers is 0"),
        (lambda: replace(COLLECT, num_held_out=0), "num_held_out is 0"),
        (lambda: replace(COLLECT, temperatures=(-0.5,)), r"temperatures are \[-0.5\]"),
        (lambda: split_prompts([], num_held_out=-1, seed=0), "num_held_out is -1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask()


def test_all_packages_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    missing = {"deepspeed", "pyarrow"}
    monkeypatch.setattr(
        "eesd_dist.distill.checks.find_spec",
        lambda name: None if name in missing else found(name),
    )
    with pytest.raises(ConfigError, match=r"needs deepspeed, pyarrow.*eesd-dist\[distill\]"):
        distill.main(["evaluate"])


def test_a_file_where_a_folder_was_meant_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    assert cli.main(["distill", "collect", "--out", str(file), "--limit", "1"]) == 2
    assert capsys.readouterr().err == f"eesd: {file}: File exists\n"
    assert file.read_text() == "mine"


def test_a_worker_that_cannot_write_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe: Recipe = recipe_of(COLLECT)
    job = Job(
        model=BUNDLED_MODEL, folder=tmp_path, recipe=recipe, dtype="float32", batch=1, threads=1
    )
    worker = ChunkWorker(job, 60.0)

    def full(chunk: str) -> dict[str, object]:
        raise OSError(28, "No space left on device", str(tmp_path / "shard"))

    monkeypatch.setattr(worker, "_made", full)
    assert worker._said("{}") == {"config_error": f"{tmp_path}/shard: No space left on device"}


def test_a_broken_workers_own_words_are_told_without_colours() -> None:
    told = "\x1b[36mray::map()\x1b[39m (pid=1)\n  File x.py\n\x1b[31mMemoryError: too much\x1b[0m\n"
    assert cause_of(RuntimeError(told)) == "ray::map() (pid=1): MemoryError: too much"
    assert cause_of(RuntimeError("gone")) == "gone"
    assert cause_of(RuntimeError()) == "RuntimeError"
