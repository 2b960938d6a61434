"""Tokenising, and writing large answers, outside the event loop, with bounded concurrency.

The tokenizer's library releases the GIL. Short texts stay on the loop: 4,096 characters take 2 ms,
and do not wait for the long texts of other requests.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from eesd_dist.errors import CapacityError

T = TypeVar("T")

_INLINE_CHARS = 4096
_NUM_THREADS = 2
_MAX_QUEUED = 64


class TextThreads:
    """Runs work on texts."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="text")
        self._num_queued = 0

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """`size` is the number of characters or tokens. Raises CapacityError when too many long
        texts are waiting."""
        if size <= _INLINE_CHARS:
            return work()
        if self._num_queued == _MAX_QUEUED:
            raise CapacityError(f"{_MAX_QUEUED} long texts or grammars are waiting: try again")
        self._num_queued += 1
        try:
            return await self.finish(work)
        finally:
            self._num_queued -= 1

    async def finish(self, work: Callable[[], T]) -> T:
        """Runs what is never refused: an answer that was generated."""
        run = copy_context().run  # its log lines are about this request
        return await asyncio.get_running_loop().run_in_executor(self._pool, run, work)
