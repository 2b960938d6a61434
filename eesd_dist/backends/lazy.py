"""A call that takes seconds to compile, and without which work goes on."""

import logging
import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

STARTING_S = 5.0
"""Time that a process gets to start in, its measurements included, before it compiles."""


class LazyCompiled(Generic[T]):
    """A value that takes seconds to make: a thread makes it while work goes on without it."""

    def __init__(self, make: Callable[[], T | None], *, is_ready: bool = False) -> None:
        """`make` is called by a thread, STARTING_S after the first `get`; `is_ready`: now, since it
        takes no time, or nothing may go on without it."""
        self._make = make
        self._value = make() if is_ready else None
        self._is_asleep = not is_ready

    @classmethod
    def without(cls) -> Self:
        """Returns a value that cannot be made."""
        return cls(lambda: None, is_ready=True)

    def get(self) -> T | None:
        """Returns None while it is not made, and where it cannot be made."""
        if self._is_asleep:
            self._is_asleep = False
            timer = threading.Timer(STARTING_S, self._run)
            timer.daemon = True
            timer.start()
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._make()
        except Exception:  # the work goes on without it
            logger.exception("a compiled call is missing")
