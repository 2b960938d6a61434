"""Permits: the key of a request, whether it is served now, and what it has used."""

from collections.abc import Mapping
from math import ceil
from typing import Protocol

from starlette.types import Scope

from eesd_dist.routing.quotas import Standing
from serve_app.openai.errors import TooManyRequests, TooManyTokens
from serve_app.openai.keys import ApiKey, Permit

_PERMIT = "eesd.permit"
"""Key of a request's scope."""
RATE_LIMIT_HEADERS = (
    "x-ratelimit-limit-concurrent",
    "x-ratelimit-remaining-concurrent",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)


class Quotas(Protocol):
    """Keeps the limits of keys."""

    async def acquire(self, key: ApiKey, permit: str) -> Standing:
        """Returns whether a request of this key may be served now."""
        ...

    async def reserve(self, permit: Permit, num_tokens: int) -> Standing:
        """Returns whether this request may use so many tokens, which are then reserved for it."""
        ...

    def release(self, permit: Permit) -> None:
        """Takes back what `acquire` gave: the request is over."""
        ...


def note_permit(scope: Scope, permit: Permit) -> None:
    scope[_PERMIT] = permit


def noted_permit(scope: Scope) -> Permit | None:
    """Returns the permit of a request; None for one that needs no key, or was refused before."""
    permit: Permit | None = scope.get(_PERMIT)
    return permit


def check_standing(standing: Standing, key: ApiKey) -> None:
    """Raises CapacityError for a request that is refused."""
    if standing.refusal == "concurrency":
        raise TooManyRequests(
            key=key.name, limit=key.max_concurrent_requests or 0, wait_s=standing.wait_s
        )
    if standing.refusal == "tokens":
        raise TooManyTokens(key=key.name, limit=key.tokens_per_minute or 0, wait_s=standing.wait_s)


def rate_limit_headers(standing: Standing, key: ApiKey) -> Mapping[str, str]:
    """Returns how a caller stands, for the limits that it has; for tokens in the form of OpenAI's
    headers."""
    headers: dict[str, str] = {}
    if (limit := key.max_concurrent_requests) is not None:
        headers["x-ratelimit-limit-concurrent"] = str(limit)
        headers["x-ratelimit-remaining-concurrent"] = str(max(0, limit - standing.num_running))
    if (limit := key.tokens_per_minute) is not None:
        headers["x-ratelimit-limit-tokens"] = str(limit)
        headers["x-ratelimit-remaining-tokens"] = str(standing.num_tokens_left)
        headers["x-ratelimit-reset-tokens"] = f"{ceil(standing.wait_s)}s"
    return headers
