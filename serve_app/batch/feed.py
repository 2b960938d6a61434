"""The rows of a job on their way to its engines.

An actor of its own holds the batches without written results: a batch that was lost with a process
is given out again.
"""

import asyncio
from collections.abc import Sequence

_NONE = b""


class RowFeed:
    """Holds batches of rows, and gives each to the first task that asks; tasks have numbers."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self._batches: dict[int, bytes] = {}
        """The batches that were given out, by the number of their task."""
        self._ended: set[int] = set()
        """Numbers of tasks with written results."""

    async def put(self, rows: bytes) -> None:
        """Takes the pickled rows of a batch."""
        self._waiting.put_nowait(rows)

    async def close(self) -> None:
        """Notes that there are no more rows: tasks without a batch get none."""
        self._waiting.put_nowait(_NONE)

    async def get(self, number: int) -> bytes:
        """Returns the batch of a task: the next one, or that of an earlier attempt. Empty if there
        is none, or its results are written."""
        if number in self._ended:
            return _NONE
        if number not in self._batches:
            rows = await self._waiting.get()
            if rows == _NONE:
                self._waiting.put_nowait(_NONE)  # for the next one that asks
                return _NONE
            self._batches[number] = rows
        return self._batches[number]

    async def forget(self, numbers: Sequence[int]) -> None:
        """Drops batches that are written."""
        for number in numbers:
            self._batches.pop(number, None)
            self._ended.add(number)


def batch_sizes(num_rows: int, *, batch_size: int, num_slots: int) -> list[int]:
    """Returns the numbers of rows of a job's batches. The last ones are smaller, so that no engine
    waits for another's: `num_slots` batches run at the same time."""
    sizes = []
    while num_rows:
        sizes.append(max(1, min(batch_size, num_rows // (2 * num_slots))))
        num_rows -= sizes[-1]
    return sizes
