"""A rank's weights and pages: made at the first use, kept for every later epoch."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from eesd_dist.errors import EngineError

T = TypeVar("T")
W = TypeVar("W")


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


class PagedOnce(Generic[W, T]):
    """Weights that are loaded once, and what is built from them for a number of pages."""

    def __init__(self, load: Callable[[], W], build: Callable[[W, int], T]) -> None:
        self._weights = LoadedOnce(load)
        self._build = build
        self._building = threading.Lock()
        self._built: list[tuple[int, T]] = []

    def load(self) -> W:
        """Returns the weights, loading them if needed. From any thread; callers share one load."""
        return self._weights.get()

    def get(self, *, num_pages: int) -> T:
        """Returns what was built; the first call allocates the pages.

        Raises EngineError for another number than in the first call.
        """
        weights = self.load()
        with self._building:
            if not self._built:
                self._built.append((num_pages, self._build(weights, num_pages)))
            built_for, built = self._built[0]
        if built_for != num_pages:
            raise EngineError(
                f"this rank has {built_for} KV pages, its epoch has {num_pages}: replace the rank"
            )
        return built

    def present(self, action: str) -> T:
        """Returns what was built without waiting. Raises EngineError that begins with `action`
        while there is nothing."""
        if not self._built:
            raise EngineError(f"{action} now: this rank is being built; try again")
        return self._built[0][1]
