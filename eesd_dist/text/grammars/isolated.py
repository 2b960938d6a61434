"""Starts the process that compiles grammars of strangers.

What takes that process over finds nothing there: no variable of this process's environment, and no
file of the working directory, of PYTHONPATH or of the user's folders among its imports.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def isolated_process(file: Path, *args: str, package: str) -> "subprocess.Popen[bytes]":
    """Runs a file with pipes for its input and output. Its last argument is the folder that holds
    `package`, to import that one from: `-I` leaves out folders of the user."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parents[1]
    return subprocess.Popen(
        [sys.executable, "-I", str(file), *args, str(folder)],
        env={},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
