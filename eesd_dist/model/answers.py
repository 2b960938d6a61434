"""Caches self-check results on disk, so that only the first start on a machine computes them.

On a CPU a result depends on the check's parameters, the processor, the torch build and the settings
of its math libraries; all of them are part of the cache key. A folder that cannot be read or
written costs only time. On a GPU nothing is cached: a check takes milliseconds there, and drivers
and libraries can change under the same torch build.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from eesd_dist.devices import backend_of
from eesd_dist.user_folders import cache_folder

logger = logging.getLogger(__name__)

_CHANGING_FACTS = ("apicid", "bogomips", "core id", "cpu MHz", "initial apicid", "processor")
_LIBRARY_SETTINGS = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_")


class AnswersBackend(Protocol):
    """Part of a backend that the cache uses."""

    caches_answers: bool
    """True if a result stays true until what is part of the key changes."""


def cached_answer(
    question: Mapping[str, object], ask: Callable[[], bool], *, device: torch.device
) -> bool:
    """Returns the cached result, or calls `ask` and caches its result."""
    backend: AnswersBackend = backend_of(device).model
    if not backend.caches_answers:
        return ask()
    key = json.dumps({**_machine(), **question}, sort_keys=True)
    file = cache_folder() / "self_checks" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    holds = _read(file, key)
    if holds is None:
        holds = ask()
        _write(file, json.dumps({"key": key, "holds": holds}))
    return holds


def _read(file: Path, key: str) -> bool | None:
    """Returns None if the file has no result for this key."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("key") != key:
        return None
    holds = record.get("holds")
    return holds if isinstance(holds, bool) else None


def _write(file: Path, content: str) -> None:
    """Writes atomically: several ranks may run the same check at the same time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".partial", delete=False, encoding="utf-8"
        ) as partial:
            partial.write(content)
        os.replace(partial.name, file)
    except OSError as error:
        logger.debug("self-check not kept: folder=%s reason=%s", file.parent, error)


def _machine() -> dict[str, object]:
    settings = {
        name: value for name, value in os.environ.items() if name.startswith(_LIBRARY_SETTINGS)
    }
    return _build() | {"settings": settings}


@cache
def _build() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "config": torch.__config__.show(),
        "cpu": _first_processor(),
        "usable": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _first_processor() -> list[str]:
    """Returns its model, stepping, caches and flags; math libraries choose routines by them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return [platform.processor()]
    lines = text.split("\n\n")[0].splitlines()
    return [line for line in lines if not line.startswith(_CHANGING_FACTS)]
