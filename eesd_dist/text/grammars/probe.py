"""Compiles grammars of strangers in a process of its own first.

The compiler recurses, and neither its stack nor its time is bounded by its limits: a chain of some
thousand rules ends the process with a segmentation fault. So an ingress compiles only what a child
has compiled within two seconds, a quarter of the stack, and bounded memory. What takes that process
over finds nothing there: no variable of this process's environment, and no file of the working
directory, of PYTHONPATH or of the user's folders among its imports.
"""

import json
import select
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars.compiler import LIMITS

_WITHIN_S = 2.0
_STARTS_WITHIN_S = 30.0
_EMPTY = 'start: "a"'


class GrammarProbe:
    """The child, started for the first grammar and again after one that it could not compile. From
    any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def check(self, grammar: str) -> None:
        """Raises RequestError for a grammar that the child does not compile in time."""
        with self._lock:
            if self._child is None:
                self._child = _started()
                self._end = weakref.finalize(self, _kill, self._child)
                if not self._answers(_EMPTY, within_s=_STARTS_WITHIN_S):
                    raise RequestError("grammars cannot be compiled now: try again")
            if not self._answers(grammar, within_s=_WITHIN_S):
                raise RequestError(
                    "the grammar cannot be used: it takes too much time or memory to compile"
                )

    def _answers(self, grammar: str, *, within_s: float) -> bool:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(grammar).encode() + b"\n")
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], within_s)
            if ready and child.stdout.readline():
                return True
        except BrokenPipeError:
            pass
        self._child = None
        if self._end is not None:
            self._end.detach()
        _kill(child)
        return False


def _kill(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    with suppress(BrokenPipeError):  # what it has not read
        child.communicate()


def _started() -> "subprocess.Popen[bytes]":
    file = Path(__file__).with_name("probe_process.py")
    return _isolated_process(file, json.dumps(LIMITS), package="llguidance")


def _isolated_process(file: Path, *args: str, package: str) -> "subprocess.Popen[bytes]":
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
