"""Loads a rank's share of a checkpoint piece by piece, and reads ahead by one piece.

A piece is a layer, the embedding or the LM head. Before any data is read, the headers are checked
for every tensor of every piece, so that a checkpoint that does not fit is refused at once and the
total size is known. Then one thread reads, never more than one piece ahead, while the caller's
thread packs. In addition to the packed weights a rank therefore holds at most the current piece,
the next one, and one matrix in float32 where a product is packed from that.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from eesd_dist.model.weights import Checkpoint, Headers, TensorSource
from eesd_dist.types import LoadProgress

T = TypeVar("T")

OnProgress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Generic[T]):
    """Tensors that are read together and then packed."""

    name: str
    read: Callable[[TensorSource], T]
    """Runs in the reading thread; its tensors must not be views of a file."""
    pack: Callable[[T], None]


def unwatched(progress: LoadProgress) -> None:
    """Ignores the progress of a load."""


def load_pieces(folder: Path, pieces: Sequence[Piece[Any]], *, on_progress: OnProgress) -> None:
    """Reads and packs all pieces in order. Raises CheckpointError for missing or unfit tensors."""
    with Checkpoint(folder) as checkpoint:
        sizes = [_size_of(piece, checkpoint) for piece in pieces]
        checkpoint.close_files()
        total, done, started_s = sum(sizes), 0, monotonic()

        def tell(piece: str) -> None:
            seconds = monotonic() - started_s
            on_progress(
                LoadProgress(bytes_done=done, bytes_total=total, piece=piece, seconds=seconds)
            )

        def read(piece: Piece[T]) -> T:
            content = piece.read(checkpoint)
            checkpoint.close_files()
            return content

        tell("")
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as reader:
            waiting = list(pieces)
            ahead = reader.submit(read, waiting[0]) if waiting else None
            for piece, size in zip(pieces, sizes, strict=True):
                assert ahead is not None, "one was submitted for each piece"
                content = ahead.result()
                waiting.pop(0)
                ahead = reader.submit(read, waiting[0]) if waiting else None
                piece.pack(content)
                del content
                _give_back()
                done += size
                tell(piece.name)


def _give_back() -> None:
    """Returns freed memory to the system: glibc would keep blocks of less than 32 MiB.

    Does nothing if the C library has no `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _size_of(piece: Piece[Any], checkpoint: Checkpoint) -> int:
    headers = Headers(checkpoint)
    piece.read(headers)
    return headers.size_bytes
