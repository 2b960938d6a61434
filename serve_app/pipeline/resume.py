"""Continues a stream where it broke off.

A request is its prompt, its parameters, its seed and its tokens so far: with these it can be
submitted again, to the same engine or another, and gives the tokens that were still to come.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from eesd_dist.errors import CapacityError, EesdError, EngineError, Migrated, PeerLost
from eesd_dist.types import Emission, Request
from eesd_dist.workers.messages import StreamItem

logger = logging.getLogger(__name__)

Source = Callable[[Request], AsyncGenerator[StreamItem, None]]


class Resubmit(EesdError):
    """Raised by a source that has released the stream without losing it: submit it again."""


async def resumed(
    request: Request,
    *,
    source: Source,
    until_ready: Callable[[EesdError], Awaitable[None]],
    max_interruptions: int | None,
    room_wait_s: float,
    max_migrations: int = 0,
    breath_s: float = 0.25,
) -> AsyncGenerator[tuple[Emission, ...], None]:
    """Yields the request's emissions to the last, over as many submissions as it takes.

    After a lost peer `until_ready` waits, and raises when it has taken too long. A request that is
    interrupted more than `max_interruptions` times in a row without a token is given up; None
    leaves that to `source` and `until_ready`. Interruptions with progress between them are not
    bounded. Any other error is raised, except that a stream which has begun waits for room instead
    of being refused, for `room_wait_s` at most.

    A migrated stream continues at once; `source` knows where. Without `max_migrations` the error is
    raised. After so many migrations in a row without a token the stream waits as if lost, without
    counting as an interruption; only `room_wait_s` ends it.

    Crashes are counted by engines and passed on; nothing is added to them here.
    """
    num_migrations = 0
    num_losses = 0
    is_resumed = False
    refused_since_s: float | None = None
    migrating_since_s: float | None = None
    while True:
        try:
            async with aclosing(_until_error(source, request)) as parts:
                async for part in parts:
                    refused_since_s = migrating_since_s = None
                    num_migrations = num_losses = 0
                    emissions = _as_first_seen(part) if is_resumed else part
                    request = _with_tokens(request, emissions)
                    yield emissions
                    if emissions[-1].finish_reason is not None:
                        return
            lost: EesdError = PeerLost(
                peer="pipeline", operation="stream", reason="it ended without a last token"
            )
            num_losses += 1
        except Resubmit:
            is_resumed = True
            continue
        except PeerLost as error:
            lost = error
            num_losses += 1
        except Migrated as error:
            if max_migrations == 0:
                raise
            is_resumed = True
            request = replace(
                request,
                crashes=max(request.crashes, error.crashes),
                attributable_crashes=max(request.attributable_crashes, error.attributable_crashes),
            )
            num_migrations += 1
            migrating_since_s = migrating_since_s or time.monotonic()
            if num_migrations <= max_migrations:
                logger.info("stream migrated: request=%s error=%s", request.request_id, error)
                continue
            if time.monotonic() - migrating_since_s > room_wait_s:
                raise EngineError(
                    f"migrated to and fro for {room_wait_s:g} s without a token: {error}"
                ) from error
            num_migrations = 0
            lost = error
        except CapacityError as error:
            if not request.generated and not is_resumed:
                raise
            is_resumed = True
            refused_since_s = refused_since_s or time.monotonic()
            if time.monotonic() - refused_since_s > room_wait_s:
                raise EngineError(
                    f"no room to continue within {room_wait_s:g} s: {error}"
                ) from error
            await asyncio.sleep(breath_s)
            continue
        is_resumed = True
        logger.warning(
            "stream interrupted: request=%s tokens=%d error=%s",
            request.request_id,
            len(request.generated),
            lost,
        )
        if max_interruptions is not None and num_losses > max_interruptions:
            raise EngineError(
                f"given up after {num_losses} interruptions without a token: {lost}"
            ) from lost
        await asyncio.sleep(breath_s)  # the supervisor may not have noticed the loss yet
        await until_ready(lost)


async def _until_error(
    source: Source, request: Request
) -> AsyncGenerator[tuple[Emission, ...], None]:
    async with aclosing(source(request)) as items:
        async for item in items:
            if isinstance(item, EesdError):
                raise item
            yield item


def _as_first_seen(emissions: tuple[Emission, ...]) -> tuple[Emission, ...]:
    """Drops what a resumed submission counts differently: cached prompt tokens and queue time."""
    return tuple(replace(e, num_cached_prompt_tokens=0, queue_s=None) for e in emissions)


def _with_tokens(request: Request, emissions: tuple[Emission, ...]) -> Request:
    new = tuple(token for emission in emissions for token in emission.tokens)
    if not new:
        return request
    return replace(request, generated=request.generated + new, crashes=0, attributable_crashes=0)
