"""Results that are the same for all clients, and cost more than an answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """A result that is made at most once in `period_s`, however many requests need it; an error is
    one too.

    It is made outside of any request: the client of the first one may leave, and Ray then cancels
    the calls of its request.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        *,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._period_s = period_s
        self._clock = clock
        self._making: asyncio.Task[T] | None = None
        """The latest; None before the first."""
        self._ended_s = 0.0

    async def __call__(self) -> T:
        if self._making is None or self._is_old(self._making):
            self._making = asyncio.get_running_loop().create_task(
                self._compute(), context=Context()
            )
            self._making.add_done_callback(_retrieve)
        return await asyncio.shield(self._making)

    def _is_old(self, making: asyncio.Task[T]) -> bool:
        return making.done() and self._clock() - self._ended_s >= self._period_s

    async def _compute(self) -> T:
        try:
            return await self._make()
        finally:
            self._ended_s = self._clock()


def _retrieve(making: asyncio.Task[T]) -> None:
    """Keeps asyncio from logging an error that no request waits for any more."""
    if not making.cancelled():
        making.exception()
