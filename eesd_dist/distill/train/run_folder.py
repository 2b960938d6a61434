"""Files of a training run: checkpoints, log and options.

    job.json          options of the run; another job is refused in this folder
    step-00000100/    a complete checkpoint; the last two are kept
    saving-00000120/  an incomplete checkpoint, being written or left by an interruption
    best/             the best head on held-out text
    log.jsonl         a row per logged step, each step once
    tensorboard/

A checkpoint gets its name when it is completely on disk, so that an interruption leaves the
previous one. Does not depend on the content of a checkpoint.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from eesd_dist.distill.folders import claim, require_same
from eesd_dist.errors import ConfigError
from eesd_dist.model.config_fields import read_json

_KEPT = 2


class RunFolder:
    """Folder of a run. Only one rank writes to it; others may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = folder / "best"
        self.log = folder / "log.jsonl"
        self.tensorboard = folder / "tensorboard"
        self._job = folder / "job.json"

    def require_own(self, job: Mapping[str, object]) -> None:
        """Raises ConfigError if the folder belongs to another job; changes nothing."""
        if self._job.exists():
            require_same(self._job, job)

    def claim(self, job: Mapping[str, object]) -> None:
        """Assigns the folder to this job, and removes incomplete checkpoints."""
        claim(self._job, job)
        for left in self.folder.glob("saving-*"):
            shutil.rmtree(left)

    def latest_step(self) -> int | None:
        """Returns the step of the last complete checkpoint."""
        steps = self._steps()
        return steps[-1] if steps else None

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """Returns the folder to which an incomplete checkpoint is written."""
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
        """Drops the rows of steps that will be repeated, and an incomplete last row."""
        if not self.log.exists():
            return
        whole = [line for line in self.log.read_bytes().splitlines(True) if line.endswith(b"\n")]
        rows = [line for line in whole if json.loads(line)["step"] <= after_step]
        partial = self.log.with_suffix(".partial")
        partial.write_bytes(b"".join(rows))
        partial.replace(self.log)

    def _steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))


def require_free(out: Path, job: Mapping[str, object]) -> None:
    """Raises ConfigError if `out` has anything but the head of this job, by its config.json: only
    that may be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: found a file, expected a folder for the head: use another one")
    config = out / "config.json"
    provenance = read_json(config).get("provenance") if config.exists() else None
    training = provenance.get("training") if isinstance(provenance, dict) else None
    origin = training if isinstance(training, dict) else {}
    is_ours = all(origin.get(key) == option for key, option in json.loads(json.dumps(job)).items())
    if any(out.iterdir()) and not is_ours:
        raise ConfigError(
            f"{out}: found a folder with something in it that this training did not make, expected "
            "none: use another folder with --out, or remove this one"
        )


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
