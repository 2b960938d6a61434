"""A stream that goes on where it was broken off.

A request is its prompt, its parameters, its seed and its tokens so far: whoever holds these can
submit it again, to the same engine or another, and receive the tokens that were still to come.
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
    """A source's word that it has let go of the stream for now: not lost, submit it again."""


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
    """The request's emissions to the last, over as many submissions as it takes.

    A lost peer is waited out by `until_ready`, which raises when it has taken too long. A request
    that is interrupted again and again without a token in between is given up; None leaves that to
    `source` and `until_ready`. Interruptions with progress between them are not bounded. Any other
    error is the request's own and is raised, except that a stream which has begun waits for room
    instead of being refused, `room_wait_s` at most.

    A stream that is migrated goes on at once, `source` knowing where. Without `max_migrations` the
    error is passed on. After so many migrations in a row without a token the stream waits as if
    lost, without counting as an interruption; only `room_wait_s` ends it.

    Crashes are an engine's word about the request and are passed on; nothing here adds to them.
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
                    f"handed to and fro for {room_wait_s:g} s without a token: {error}"
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
                    f"no room within {room_wait_s:g} s to go on in: {error}"
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
        await asyncio.sleep(breath_s)  # who lost a peer may know it before those who replace it
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
    """To whoever is resumed, earlier tokens are prompt and arrival is now; not to the client."""
    return tuple(replace(e, num_cached_prompt_tokens=0, queue_s=None) for e in emissions)


def _with_tokens(request: Request, emissions: tuple[Emission, ...]) -> Request:
    new = tuple(token for emission in emissions for token in emission.tokens)
    if not new:
        return request
    return replace(request, generated=request.generated + new, crashes=0, attributable_crashes=0)
