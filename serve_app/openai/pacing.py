"""Sends the tokens of a stream in events of a fixed number, at fixed times.

How many tokens of a draft are accepted depends on the text, and shows in the sizes and times of
events also where they are encrypted. Here neither depends on it, as long as the engine is ahead:
from the first token on there is one event of as many tokens at every tick, and where too few have
been made by then, that tick has none. Knows no engine and no HTTP.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from serve_app.openai.generation import Delta, merged_delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times at which the events of a stream are sent, and the number of tokens that each has."""

    interval_s: float
    tokens_per_event: int


async def paced(
    deltas: AsyncGenerator[Delta, None], pace: Pace, *, num_shown: int = 0
) -> AsyncGenerator[Delta, None]:
    """Yields deltas of at most one token each as deltas of `tokens_per_event` tokens, at ticks; the
    last one may have fewer. The first `num_shown` tokens, which the client has, are not delayed.

    An error of the source is raised behind the tokens that came before it.
    """
    buffer = _Buffer()
    reading = asyncio.create_task(buffer.read(deltas))
    try:
        while num_shown > 0 and (delta := await buffer.next()) is not None:
            num_shown -= len(delta.text_delta.tokens)
            yield delta
        if not await buffer.wait_for_first():
            return
        async for _ in _ticks(pace.interval_s):
            if buffer.num_tokens >= pace.tokens_per_event or buffer.is_over:
                chunk = buffer.take(pace.tokens_per_event)
                if chunk is None:
                    return
                yield chunk
                if chunk.text_delta.finish_reason is not None:
                    return
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _ticks(interval_s: float) -> AsyncGenerator[None, None]:
    """Yields at multiples of the interval from now on; those that were missed are left out."""
    loop = asyncio.get_running_loop()
    began_s, number = loop.time(), 0
    while True:
        number = max(number + 1, math.ceil((loop.time() - began_s) / interval_s))
        await asyncio.sleep(began_s + number * interval_s - loop.time())
        yield


class _Buffer:
    """The deltas of one text that an engine has made and that were not sent yet."""

    def __init__(self) -> None:
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self.num_tokens = 0
        self.is_over = False

    async def read(self, deltas: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    self._deltas.append(delta)
                    self.num_tokens += len(delta.text_delta.tokens)
                    self._arrived.set()
        except Exception as error:  # raised again behind what came before it
            self._error = error
        self.is_over = True
        self._arrived.set()

    async def wait_for_first(self) -> bool:
        """Waits for the first delta; returns False if there is none. Raises the source's error."""
        await self._arrived.wait()
        if not self._deltas and self._error is not None:
            raise self._error
        return bool(self._deltas)

    async def next(self) -> Delta | None:
        """Returns the next delta as soon as it is there; None behind the last one."""
        if not await self.wait_for_first():
            return None
        return self.take(1)

    def take(self, num_tokens: int) -> Delta | None:
        """Returns the next deltas with so many tokens as one; None if there is none. Raises the
        source's error behind the last one."""
        batch: list[Delta] = []
        num_left = num_tokens
        while self._deltas and len(self._deltas[0].text_delta.tokens) <= num_left:
            batch.append(self._deltas.popleft())
            num_left -= len(batch[-1].text_delta.tokens)
        self.num_tokens -= num_tokens - num_left
        if not self._deltas and not self.is_over:
            self._arrived.clear()
        if batch:
            return replace(merged_delta(batch), at_s=time.monotonic(), num_buffered=self.num_tokens)
        if self._error is not None:
            raise self._error
        return None
