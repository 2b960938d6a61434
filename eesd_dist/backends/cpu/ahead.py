"""Waiting for kernels that another process on this machine compiles.

On a machine that has kept none, every rank would compile the same ones before its first round, and
slow down the rounds of those that are ready. One process compiles them for all
(`workers/compiling`). Ranks wait for the kernel of layers before they load, and take the calls of a
whole round when they are there (`lazy.LazyCompiled`).
"""

import fcntl
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from eesd_dist.backends.cpu.compiled import can_compile, kernels_folder
from eesd_dist.backends.lazy import LazyCompiled

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOCK_FILE = "at-work"
_POLL_S = 0.2
_LONGEST_S = 120.0


@contextmanager
def compile_lock() -> Iterator[bool]:
    """Holds the lock of the process that compiles; yields False if another process holds it.

    Raises OSError where nothing can be kept.
    """
    folder = kernels_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_FILE).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def is_compiling() -> bool:
    """Returns whether a process on this machine compiles kernels."""
    try:
        with (kernels_folder() / _LOCK_FILE).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # none has ever been, or there cannot be one
        return False
    return False


def has_compiler() -> bool:
    """Returns whether kernels of a CPU can be compiled here."""
    return can_compile()


def wait_for_layers() -> None:
    """Waits for the kernel of layers, as `wait_for`."""
    from eesd_dist.backends.cpu.kernels.layers import is_layers_kernel_cached

    wait_for(is_layers_kernel_cached)


def wait_for(is_cached: Callable[[], bool]) -> None:
    """Waits until a kernel is kept, or no process on this machine compiles any."""
    _wait_for(is_cached, longest_s=_LONGEST_S)


def compile_when_cached(
    make: Callable[[], T | None], *, is_cached: Callable[[], bool], is_needed: bool
) -> LazyCompiled[T]:
    """Returns the result of `make`, which uses a kernel: made at once if the kernel is cached or
    `is_needed`, else in the background."""

    def make_later() -> T | None:
        # Compiling here would hold the interpreter's lock for seconds: work goes on without it.
        _wait_for(is_cached, longest_s=_LONGEST_S)
        _wait_for(is_cached, longest_s=math.inf)  # the log has been told
        return make()

    is_ready = is_needed or is_cached()
    return LazyCompiled(make if is_ready else make_later, is_ready=is_ready)


def _wait_for(is_cached: Callable[[], bool], *, longest_s: float) -> None:
    began = time.monotonic()
    while is_compiling() and not is_cached():
        if time.monotonic() > began + longest_s:
            logger.warning("kernels not waited for: seconds=%.0f", longest_s)
            return
        time.sleep(_POLL_S)
