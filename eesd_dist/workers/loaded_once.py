"""A rank's weights: read by the first caller that needs them, kept for every later epoch."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from eesd_dist.errors import EngineError

T = TypeVar("T")


class LoadedOnce(Generic[T]):
    """Loads at the first `get`. A load that failed is repeated by the next one."""

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._loaded: list[T] = []

    def get(self) -> T:
        """From any thread; a second caller waits for the first one's load."""
        with self._loading:
            if not self._loaded:
                self._loaded.append(self._load())
            return self._loaded[0]

    def present(self, wish: str) -> T:
        """Returns what is loaded, at once. Raises EngineError that names the `wish` while nothing
        is."""
        if not self._loaded:
            raise EngineError(f"{wish} now: this rank is being built; try again")
        return self._loaded[0]
