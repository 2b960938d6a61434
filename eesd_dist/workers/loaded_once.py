"""A rank's weights: loaded at the first use, kept for every later epoch."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from eesd_dist.errors import EngineError

T = TypeVar("T")


class LoadedOnce(Generic[T]):
    """Loads at the first `get`. The next call repeats a failed load."""

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._loaded: list[T] = []

    def get(self) -> T:
        """Returns the value, loading it if needed. From any thread; callers share one load."""
        with self._loading:
            if not self._loaded:
                self._loaded.append(self._load())
            return self._loaded[0]

    def present(self, action: str) -> T:
        """Returns the value without waiting. Raises EngineError that begins with `action` while
        nothing is loaded."""
        if not self._loaded:
            raise EngineError(f"{action} now: this rank is being built; try again")
        return self._loaded[0]
