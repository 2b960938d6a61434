"""Starts processes for work on grammars of strangers.

A compiler or a matcher that a stranger's grammar has taken over, or has brought to its end, finds
nothing there: no variable of this process's environment, no file of the working directory or of
PYTHONPATH to import, a bounded memory, no core file.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("eesd_dist", "llguidance", "msgspec", "numpy", "tokenizers", "jinja2")
"""What such a process imports."""


def isolated_process(file: Path, *args: str) -> "subprocess.Popen[bytes]":
    """Runs a file with pipes for its input and its output. Its last argument has the folders of the
    packages that it may import, for `sys.path`: `-I` leaves out those of the user."""
    return subprocess.Popen(
        [sys.executable, "-I", str(file), *args, "\n".join(_folders())],
        env={},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _folders() -> list[str]:
    """Returns the folders that hold the packages, without those of this process's first imports."""
    specs = (find_spec(name) for name in _PACKAGES)
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(file.parents[1]) for file in files))
