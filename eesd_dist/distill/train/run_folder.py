"""The files of a training run: its checkpoints, its log, and what it was asked for.

    job.json          what was asked: another job may not go on in this folder
    step-00000100/    a checkpoint, whole; the last two are kept
    saving-00000120/  one that is being written, or was when we were killed
    best/             the head that did best on held-out text
    log.jsonl         a row per logged step, each step once
    tensorboard/

A checkpoint gets its name when all of it is on the disk, so that a kill at any moment leaves the
one before. It knows no tensors: what stands inside a checkpoint is its writer's business.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from eesd_dist.errors import CheckpointError, ConfigError

_KEPT = 2


class RunFolder:
    """One rank writes here; the others may look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = folder / "best"
        self.log = folder / "log.jsonl"
        self.tensorboard = folder / "tensorboard"
        self._job = folder / "job.json"

    def require_own(self, job: Mapping[str, object]) -> None:
        """Raises ConfigError when the folder is another job's; changes nothing."""
        if self._job.exists():
            _require_same(self._job, _read_json(self._job), json.loads(json.dumps(job)))

    def claim(self, job: Mapping[str, object]) -> None:
        """Makes the folder this job's, and clears away what a kill left."""
        self.require_own(job)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._job.exists():
            partial = self._job.with_suffix(".partial")
            partial.write_text(json.dumps(job, indent=2) + "\n", encoding="utf-8")
            partial.replace(self._job)
        for left in self.folder.glob("saving-*"):
            shutil.rmtree(left)

    def latest_step(self) -> int | None:
        """Of the last whole checkpoint."""
        steps = self._steps()
        return steps[-1] if steps else None

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """Where a checkpoint is written before it is one."""
        return self.folder / f"saving-{step:08d}"

    def commit(self, step: int) -> None:
        """What stands in `unfinished(step)` is a checkpoint from now on; older ones go."""
        written, final = self.unfinished(step), self.checkpoint(step)
        for file in written.rglob("*"):
            _to_disk(file)
        _to_disk(written)
        if final.exists():
            shutil.rmtree(final)
        written.rename(final)
        _to_disk(self.folder)
        for old in self._steps()[:-_KEPT]:
            shutil.rmtree(self.checkpoint(old))

    def write_row(self, row: Mapping[str, object]) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")

    def cut_log(self, *, after_step: int) -> None:
        """Drops the rows of steps that will be taken again, and a row torn by a kill."""
        if not self.log.exists():
            return
        whole = [line for line in self.log.read_bytes().splitlines(True) if line.endswith(b"\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= after_step]
        partial = self.log.with_suffix(".partial")
        partial.write_bytes(b"".join(kept))
        partial.replace(self.log)

    def _steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))


def put_in_place(folder: Path, final: Path) -> None:
    """`final` becomes `folder`; what stood there goes."""
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.old")
    if aside.exists():
        shutil.rmtree(aside)
    if final.exists():
        final.rename(aside)
    folder.rename(final)
    if aside.exists():
        shutil.rmtree(aside)


def require_free(out: Path, job: Mapping[str, object]) -> None:
    """Raises ConfigError when a head cannot be put there without taking away what is not this
    job's: its own head, found by what its config.json says of its training, may stand there."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: found a file, expected a folder for the head: name another one")
    config = out / "config.json"
    provenance = _read_json(config).get("provenance") if config.exists() else None
    training = provenance.get("training") if isinstance(provenance, dict) else None
    made_by = training if isinstance(training, dict) else {}
    is_ours = all(made_by.get(key) == said for key, said in json.loads(json.dumps(job)).items())
    if any(out.iterdir()) and not is_ours:
        raise ConfigError(
            f"{out}: found a folder with something in it that this training did not make, expected "
            "none: name another folder with --out, or remove this one"
        )


def _require_same(file: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{file}: found a run with {key} {found.get(key)!r}, asked for {wanted[key]!r}: "
            "ask for the same to go on with it, or name another folder for the checkpoints"
        )


def _read_json(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            file=file, found=f"no JSON ({error})", expected="what a run was asked for"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(file=file, found="no object", expected="what a run was asked for")
    return found


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
