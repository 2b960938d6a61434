"""Loads a rank's share of a checkpoint unit by unit, with several units read ahead.

A unit is a layer, the embedding or the LM head. Before any data is read, the headers are checked
for every tensor of every unit, so that a checkpoint that does not fit is refused at once and the
total size is known. Then a few threads read, each a unit of its own, while the caller's thread
packs in order: one thread leaves fast storage idle, since it waits for every block it touches.

Memory is bounded: units that are read ahead are at most `NUM_READERS`, and at most
`READ_AHEAD_BYTES` together where that is more than one unit. In addition to the packed weights a
rank therefore holds the current unit, the units ahead, the file pages from which these are
copied, and one matrix in float32 where a product is packed from that.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Generic, Self, TypeVar

from eesd_dist.model.rank_memory import NUM_READERS, num_read_ahead
from eesd_dist.model.weights import Checkpoint, Headers, TensorSource
from eesd_dist.types import LoadProgress

T = TypeVar("T")

OnProgress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadUnit(Generic[T]):
    """Tensors that are read together and then packed."""

    name: str
    read: Callable[[TensorSource], T]
    """Runs in a reading thread; its tensors must not be views of a file."""
    pack: Callable[[T], None]


def unwatched(progress: LoadProgress) -> None:
    """Ignores the progress of a load."""


def load_units(folder: Path, units: Sequence[LoadUnit[Any]], *, on_progress: OnProgress) -> None:
    """Reads and packs all units in order. Raises CheckpointError for missing or unfit tensors."""
    with Checkpoint(folder) as checkpoint:
        sizes = [_size_of(unit, checkpoint) for unit in units]
        checkpoint.close_files()
        total, done, waited_s, started_s = sum(sizes), 0, 0.0, monotonic()

        def tell(name: str) -> None:
            on_progress(
                LoadProgress(
                    bytes_done=done,
                    bytes_total=total,
                    piece=name,
                    seconds=monotonic() - started_s,
                    waited_s=waited_s,
                )
            )

        def read(unit: LoadUnit[T]) -> T:
            content = unit.read(checkpoint)
            checkpoint.close_files()
            return content

        tell("")
        with _Prefetcher(read, units, sizes) as reader:
            for unit, size in zip(units, sizes, strict=True):
                wait_started_s = monotonic()
                content = reader.take()
                waited_s += monotonic() - wait_started_s
                unit.pack(content)
                del content
                release_memory()
                done += size
                tell(unit.name)


class _Prefetcher:
    """Reads units in threads, and hands them out in order."""

    def __init__(
        self,
        read: Callable[[LoadUnit[Any]], Any],
        units: Sequence[LoadUnit[Any]],
        sizes: Sequence[int],
    ) -> None:
        self._read = read
        self._units = units
        self._sizes = sizes
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read-ahead")
        self._pending: deque[Future[Any]] = deque()
        self._num_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the reads that have begun, and drops the others."""
        self._readers.shutdown(cancel_futures=True)

    def take(self) -> Any:
        """Returns the content of the next unit, and begins to read more units after it."""
        self._fill()
        content = self._pending.popleft().result()
        self._num_read += 1
        self._fill()
        return content

    def _fill(self) -> None:
        target = num_read_ahead(self._sizes[self._num_read :])
        while len(self._pending) < target:
            unit = self._units[self._num_read + len(self._pending)]
            self._pending.append(self._readers.submit(self._read, unit))


def release_memory() -> None:
    """Returns freed memory to the system: glibc would keep blocks of less than 32 MiB.

    Does nothing if the C library has no `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _size_of(unit: LoadUnit[Any], checkpoint: Checkpoint) -> int:
    headers = Headers(checkpoint)
    unit.read(headers)
    return headers.size_bytes
