import json
import subprocess
from pathlib import Path

import pytest

from eesd_dist.provenance import _cpu_facts, collect_provenance, read_hardware


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_recipe_names_command_seed_versions_and_hardware() -> None:
    recipe = collect_provenance(seed=7, command=["eesd", "bench", "a b"])
    assert recipe.command == "eesd bench 'a b'"
    assert recipe.seed == 7
    assert dict(recipe.versions)["torch"].startswith("2.")
    assert recipe.hardware.num_cpus >= 1
    assert recipe.hardware.memory_bytes > 2**28


def test_a_program_that_may_not_be_run_ends_no_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is where PATH has folders of another user, as after `su`."""
    (tmp_path / "nvidia-smi").write_text("not executable")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_hardware().gpus == ()


def test_folders_of_a_machine_are_left_out_of_the_command() -> None:
    command = ["/home/a/bin/eesd", "--prompts", "/home/a/x.jsonl", "--out=/srv/heads/b"]
    command += ["--model", "models/c", "--url", "http://127.0.0.1:8000/v1"]
    expected = "eesd --prompts x.jsonl --out=b --model models/c --url http://127.0.0.1:8000/v1"
    assert collect_provenance(command=command).command == expected


def test_a_recipe_survives_json() -> None:
    recipe = collect_provenance(seed=None, command=["x"])
    back = json.loads(json.dumps(recipe.as_json()))
    assert back["versions"] == dict(recipe.versions)
    assert back["hardware"]["cpu_model"] == recipe.hardware.cpu_model
    assert back["seed"] is None


def test_a_changed_checkout_is_told_from_a_clean_one(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-qm", "one")
    clean = collect_provenance(root=tmp_path)
    (tmp_path / "file").write_text("two")
    changed = collect_provenance(root=tmp_path)
    assert clean.commit == changed.commit == _git(tmp_path, "rev-parse", "HEAD")
    assert clean.has_local_changes is False
    assert changed.has_local_changes is True


def test_outside_a_checkout_nothing_is_invented(tmp_path: Path) -> None:
    recipe = collect_provenance(root=tmp_path)
    assert recipe.commit is None
    assert recipe.has_local_changes is None
    assert any("not a git checkout" in line for line in recipe.lines())


def test_x86_and_arm_tell_their_flags_under_different_names() -> None:
    x86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd bf16\n"
    assert _cpu_facts(x86) == ("Some CPU", frozenset({"fpu", "avx2"}))
    assert _cpu_facts(arm) == ("", frozenset({"fp", "asimd", "bf16"}))
