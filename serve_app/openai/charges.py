"""Amounts that a request is charged, and their times.

Prompt and longest answer are reserved before an engine gets the request, so that a client that
leaves early, or sends many requests at once, uses no more than one that waits. What was used is
charged in the end. Work outside of an engine is charged before it is done.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from eesd_dist.errors import PoisonRequest
from serve_app.openai.generation import ChoiceTally, EndedByEngine
from serve_app.openai.keys import Permit
from serve_app.openai.middleware.permits import Quotas, check_standing
from serve_app.openai.prepared import Prepared

T = TypeVar("T")

GRAMMAR_TOKENS = 64
"""Charged for a grammar, whether or not it was compiled before: a caller would learn that."""
_CHARS_PER_TOKEN = 4


class Charges:
    """Charges the permits of requests. A request without a permit, or without limits, is free."""

    def __init__(self, quotas: Quotas | None) -> None:
        self._quotas = quotas

    async def reserve(self, prepared: Prepared) -> None:
        """Reserves what the request may use. Raises TooManyTokens where its key has none left."""
        if prepared.context.permit is not None:
            await self._reserve(prepared.context.permit, prepared.num_expected_tokens)

    async def work(self, permit: Permit | None, num_tokens: int) -> None:
        """Charges work that is about to be done. Raises TooManyTokens, as `reserve`."""
        if permit is not None:
            await self._reserve(permit, num_tokens)
            permit.num_work_tokens += num_tokens

    async def tokenised(self, work: Awaitable[T], permit: Permit | None, *, size: int) -> T:
        """Returns the result of work on a text of so many characters; it is charged if the client
        leaves during it."""
        try:
            return await work
        except asyncio.CancelledError:
            if permit is not None:
                permit.num_work_tokens += size // _CHARS_PER_TOKEN
            raise

    async def _reserve(self, permit: Permit, num_tokens: int) -> None:
        if self._quotas is None:
            return
        standing = await self._quotas.reserve(permit, permit.num_work_tokens + num_tokens)
        check_standing(standing, permit.key)


def charge(
    prepared: Prepared, tallies: Sequence[ChoiceTally], *, error: BaseException | None
) -> None:
    """Counts the tokens of a request that has ended; `error` is what ended it, if anything did.

    A request without a token costs its prompt if its client has left, or if the engine ended it of
    its own fault; and nothing if the service has refused or failed it.
    """
    permit = prepared.context.permit
    has_rounds = any(tally.rounds for tally in tallies)
    if permit is not None and (has_rounds or _is_of_the_client(error)):
        permit.num_prompt_tokens += prepared.num_prompt_tokens
        permit.num_generated_tokens += sum(t.num_tokens + t.num_buffered for t in tallies)


def _is_of_the_client(error: BaseException | None) -> bool:
    has_left = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return has_left or isinstance(error, EndedByEngine | PoisonRequest)
