"""Finds the folder of a target's exit head and computes digests of its files, without torch.

The process of a pipeline's replica needs no more of a head; importing torch costs it 390 MiB.
"""

import hashlib
from functools import cache
from pathlib import Path

from eesd_dist.control.calibrator import CALIBRATION_FILE
from eesd_dist.model.config_fields import read_json

_PACKAGED_HEADS = Path(__file__).parents[3] / "serve_app" / "heads"
"""Folder with the heads that come with this package, for models that are downloaded."""


def head_folder(
    path: Path, configured: Path | None = None, *, packaged: Path = _PACKAGED_HEADS
) -> Path | None:
    """Returns the folder of the exit head of the target in `path`: the configured one, that in the
    target's folder, or the one in `packaged` that was made for this target. None: no head."""
    if configured is not None:
        return configured
    if (folder := path / "exit_head").is_dir():
        return folder
    return _packaged_head(path, packaged)


@cache
def _packaged_head(path: Path, packaged: Path) -> Path | None:
    digest = target_digest(path)
    for file in sorted(packaged.glob("*/config.json")):
        match read_json(file):
            case {"speculators_config": {"verifier": {"sha256": sha256}}} if sha256 == digest:
                return file.parent
    return None


def target_digest(path: Path) -> str:
    """Returns a digest over the target's config.json and, where there is one, tokenizer.json."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        file = path / name
        if file.exists():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def head_digest(folder: Path) -> str:
    """Returns a digest of all files of a head's folder that affect drafting."""
    names = ["config.json", *sorted(f.name for f in folder.glob("*.safetensors")), CALIBRATION_FILE]
    digest = hashlib.sha256()
    for name in names:
        if (folder / name).exists():
            with (folder / name).open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
