"""The rows of a job on their way to its engines.

An actor of its own holds the batches without written results: a batch that was lost with a process
is given out again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence


class RowFeed:
    """Holds batches of rows by number."""

    def __init__(self) -> None:
        self._batches: dict[int, bytes] = {}
        self._arrivals: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def put(self, number: int, rows: bytes) -> None:
        """Takes the pickled rows of a batch."""
        self._batches[number] = rows
        self._arrivals[number].set()

    async def get(self, number: int) -> bytes:
        """Waits for a batch, and returns its rows."""
        await self._arrivals[number].wait()
        return self._batches[number]

    async def forget(self, numbers: Sequence[int]) -> None:
        """Drops batches that are written."""
        for number in numbers:
            self._batches.pop(number, None)
            self._arrivals.pop(number, None)


def batch_sizes(num_rows: int, *, batch_size: int, num_slots: int) -> list[int]:
    """Returns the numbers of rows of a job's batches. The last ones are smaller, so that no engine
    waits for another's: `num_slots` batches run at the same time."""
    sizes = []
    while num_rows:
        sizes.append(max(1, min(batch_size, num_rows // (2 * num_slots))))
        num_rows -= sizes[-1]
    return sizes
