"""Single threads of other processes, stopped by ptrace(2): what a stuck kernel or disk looks like.

A thread may be stopped while it waits in the kernel, where it has released Python's interpreter
lock (the GIL), or while it runs the interpreter's own code, where it holds the lock: then no other
thread of its process runs Python code, and the process answers nothing. Nothing here imports Ray.
"""

import ctypes
import os
import platform
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_PTRACE_CONT, _PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 7, 17, 0x4206, 0x4207
_WAIT_ALL = 0x40000000
"""`__WALL` of waitpid(2): threads too."""
_IN_NO_CALL = "-1"
"""First word of /proc/TID/syscall of a stopped thread that was in no system call."""
_PAUSE_S = 0.002
_ATTEMPT_S = 10.0
_CAP_SYS_PTRACE = 19


def why_untraceable() -> str:
    """Returns why this process cannot stop threads of others on this machine; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"ptrace as used here is Linux's, and this is {platform.system()}"
    scope = _PROC / "sys/kernel/yama/ptrace_scope"
    level = scope.read_text().strip() if scope.exists() else "0"
    if level != "0" and not (level in "12" and _has_capability(_CAP_SYS_PTRACE)):
        return f"kernel.yama.ptrace_scope is {level}: run as root (CAP_SYS_PTRACE), or set it to 0"
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            ThreadStopper().seize(child.pid)
        except OSError as error:
            return str(error)
        finally:
            child.kill()
    return ""


def _has_capability(number: int) -> bool:
    lines = (_PROC / "self/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(mask, 16) >> number & 1)


class ThreadStopper:
    """Stops one thread of another process.

    ptrace requires every call from the thread that attached: build and call this in one thread,
    such as that of a Ray actor. A stopped thread continues when the process that stopped it ends.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_long] * 4
        self._seized: int | None = None
        self._interpreter: list[range] = []

    def stop(
        self, pid: int, thread: str, *, interpreting: bool, within_s: float = _ATTEMPT_S
    ) -> bool:
        """Stops the thread of this name in the interpreter's code, or where it waits in the kernel.

        Returns False when the process has no such thread, or none in that state in time. Raises
        OSError without the rights of a debugger.
        """
        if self._seized is None:
            number = _thread_named(pid, thread)
            if number is None:
                return False
            self.seize(number)
            self._interpreter = _interpreter_code(pid)
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if (self._is_interpreting if interpreting else self._is_waiting)(self._interrupted()):
                return True
            self.go_on()
            time.sleep(random.random() * _PAUSE_S)
        return False

    def seize(self, thread: int) -> None:
        """Becomes the tracer of a thread, which goes on."""
        self._ptrace(_PTRACE_SEIZE, thread)
        self._seized = thread

    def go_on(self) -> None:
        """Lets the stopped thread continue, to be stopped again."""
        assert self._seized is not None, "nothing is stopped"
        self._ptrace(_PTRACE_CONT, self._seized)

    def release(self) -> None:
        """Lets the stopped thread continue, if it still exists."""
        with suppress(ProcessLookupError):
            self._ptrace(_PTRACE_DETACH, self._seized or 0)
        self._seized = None

    def let_die(self) -> None:
        """Collects the thread's end: until then its process, once it is killed, stays a zombie."""
        if self._seized is not None:
            threading.Thread(target=_collect, args=(self._seized,), daemon=True).start()

    def _interrupted(self) -> list[str]:
        """Stops the thread, and returns its line of /proc/TID/syscall; a system call that it is in
        goes on when the thread does."""
        thread = self._seized
        assert thread is not None, "no thread is seized"
        self._ptrace(_PTRACE_INTERRUPT, thread)
        os.waitpid(thread, _WAIT_ALL)
        return (_PROC / str(thread) / "syscall").read_text().split()

    def _is_waiting(self, call: list[str]) -> bool:
        return call[0] != _IN_NO_CALL

    def _is_interpreting(self, call: list[str]) -> bool:
        address = int(call[-1], 16)
        return call[0] == _IN_NO_CALL and any(address in code for code in self._interpreter)

    def _ptrace(self, request: int, thread: int) -> None:
        if self._libc.ptrace(request, thread, 0, 0) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"ptrace of thread {thread}: {os.strerror(number)}")


def _collect(thread: int) -> None:
    with suppress(ChildProcessError):  # it was released
        os.waitpid(thread, _WAIT_ALL)


def _interpreter_code(pid: int) -> list[range]:
    """Returns where a process has the machine code of its Python interpreter."""
    ranges = []
    for line in (_PROC / str(pid) / "maps").read_text().splitlines():
        where, rights, *_, file = line.split()
        if "x" in rights and Path(file).name.startswith(("python", "libpython")):
            start, end = where.split("-")
            ranges.append(range(int(start, 16), int(end, 16)))
    return ranges


def _thread_named(pid: int, name: str) -> int | None:
    try:
        threads = sorted((_PROC / str(pid) / "task").iterdir())
        return next(
            (int(t.name) for t in threads if (t / "comm").read_text().strip() == name), None
        )
    except FileNotFoundError:  # the process, or one of its threads, has just ended
        return None
