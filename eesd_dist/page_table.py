"""A request's KV pages in order, as an array: made once and passed on without copies."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

_ITEM_BYTES = 4


class PageTable(Sequence[int]):
    """Immutable sequence of page numbers. Slices are views of the same memory."""

    __slots__ = ("array",)

    def __init__(self, pages: Sequence[int] | npt.NDArray[np.int32]) -> None:
        self.array: npt.NDArray[np.int32] = np.asarray(pages, np.int32)

    @classmethod
    def of(cls, pages: Sequence[int]) -> "PageTable":
        return pages if isinstance(pages, cls) else cls(pages)

    @classmethod
    def from_bytes(cls, data: bytes) -> "PageTable":
        """Reads what `to_bytes` made. Raises ValueError for anything else."""
        if len(data) % _ITEM_BYTES:
            raise ValueError(f"Expected 4 bytes for each page, got {len(data)} bytes")
        array = np.frombuffer(data, "<i4")
        if (array < 0).any():
            raise ValueError(f"Expected pages >= 0, got {array.min()}")
        return cls._over(array)

    @classmethod
    def _over(cls, array: npt.NDArray[np.int32]) -> "PageTable":
        table = cls.__new__(cls)
        table.array = array
        return table

    def to_bytes(self) -> bytes:
        return self.array.astype("<i4", copy=False).tobytes()

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "PageTable": ...
    def __getitem__(self, at: int | slice) -> "int | PageTable":
        pages = self.array[at]
        return PageTable._over(pages) if isinstance(at, slice) else int(pages)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PageTable):
            return NotImplemented
        return self.array is other.array or np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __array__(self, dtype: object = None, copy: bool | None = None) -> npt.NDArray[np.int32]:
        return self.array

    def __repr__(self) -> str:
        return f"PageTable({self.array.tolist()})"
