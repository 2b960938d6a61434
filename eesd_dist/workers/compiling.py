"""Compiles kernels in a process of its own, while the ranks that need them start."""

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from eesd_dist.backends.cpu.ahead import compile_lock, has_compiler
from eesd_dist.backends.cpu.compiled import kernels_folder
from eesd_dist.config import EngineConfig
from eesd_dist.model.heads.head_files import head_folder

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_ORIGIN = ("provenance", "speculators_config")
"""Keys of a head's configuration that say where it comes from; kernels do not depend on them."""


def start_compiling(config: EngineConfig) -> None:
    """Starts the process, unless what it would compile is kept. It ends with this one."""
    if not has_compiler() or config.model.numerics != "invariant" or _kept_file(config).exists():
        return
    command = [sys.executable, "-P", "-m", __name__, config.model_dump_json()]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(process.kill)
    # Without a wait for it, a process that has ended stays in the table.
    threading.Thread(target=process.wait, name="eesd-compiling", daemon=True).start()


def _kept_file(config: EngineConfig) -> Path:
    """Returns the file that exists if the kernels for models of this shape are kept."""
    model = config.model
    digest = sha256(f"{version('numba')} {sys.implementation.cache_tag} {__file__}".encode())
    digest.update(f"{model.dtype} {model.device} {config.cache.kv_cache_dtype}".encode())
    digest.update(_shape_in(model.path))
    if (head := head_folder(model.path, model.head)) is not None:
        digest.update(_shape_in(head))
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return kernels_folder() / f"kept-{digest.hexdigest()[:16]}"


def _shape_in(folder: Path) -> bytes:
    """Returns the configuration of a checkpoint or head without its origin; empty if there is none,
    or if it cannot be read, which loading reports."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return b""
    if not isinstance(config, dict):
        return b""
    return json.dumps(
        {k: v for k, v in config.items() if k not in _ORIGIN}, sort_keys=True
    ).encode()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def main() -> None:
    """Compiles for the configuration in the argument, which is JSON."""
    config = EngineConfig.model_validate_json(sys.argv[1])
    # That of a terminal is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    try:
        with compile_lock() as has_lock:
            if has_lock:
                from eesd_dist.engine.build import compile_kernels

                compile_kernels(config)
                _kept_file(config).touch()
    except OSError as error:  # nothing can be kept: every rank compiles for itself
        logger.warning("kernels not compiled ahead: reason=%s", error)


if __name__ == "__main__":
    main()
