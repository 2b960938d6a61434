"""Copies of folders with kept kernels."""

import shutil
from pathlib import Path

_UNFINISHED = shutil.ignore_patterns("tmp*", "*.tmp.*", "*.partial")


def copy_kept(source: Path, target: Path) -> None:
    """Copies the folder while other tests may write into it: files that are not complete have other
    names, under which they vanish."""
    shutil.copytree(source, target, ignore=_UNFINISHED)
