"""The files of a training run: its checkpoints, its log, and what it was asked for.

    job.json          what was asked: another job may not go on in this folder
    step-00000100/    a checkpoint, whole; the last two are kept
    saving-00000120/  one that is being written, or was when we were killed
    best/             the head that did best on held-out text
    log.jsonl         a row per logged step, each step once
    tensorboard/

A checkpoint gets its name when all of it is on the disk, so that a kill at any moment leaves the
one before. It knows no tensors: the content of a checkpoint is up to its writer.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from eesd_dist.distill.folders import claim, require_same
from eesd_dist.errors import ConfigError
from eesd_dist.model.spec import read_json

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
            require_same(self._job, job)

    def claim(self, job: Mapping[str, object]) -> None:
        """Makes the folder this job's, and clears away what a kill left."""
        claim(self._job, job)
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
        """Makes `unfinished(step)` a checkpoint, and removes older ones."""
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


def require_free(out: Path, job: Mapping[str, object]) -> None:
    """Raises ConfigError when `out` holds anything but the head of this job, which its config.json
    tells: nothing else may be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: found a file, expected a folder for the head: name another one")
    config = out / "config.json"
    provenance = read_json(config).get("provenance") if config.exists() else None
    training = provenance.get("training") if isinstance(provenance, dict) else None
    made_by = training if isinstance(training, dict) else {}
    is_ours = all(made_by.get(key) == said for key, said in json.loads(json.dumps(job)).items())
    if any(out.iterdir()) and not is_ours:
        raise ConfigError(
            f"{out}: found a folder with something in it that this training did not make, expected "
            "none: name another folder with --out, or remove this one"
        )


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
