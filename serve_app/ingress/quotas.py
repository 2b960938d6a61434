"""Permits for requests of keys with limits, over all ingresses together.

The router is asked for a request before its body is read, and again when it is known how many
tokens it may use. While it is silent this ingress decides by itself, as if it were the only one: a
service without its router is slower, not closed.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from eesd_dist.errors import EngineError
from eesd_dist.routing.quotas import Held, Quota, QuotaBook, Standing
from serve_app.openai.keys import ApiKey, Permit
from serve_app.router.calls import acquired, reserved

logger = logging.getLogger(__name__)

_ASK_S = 0.5
"""The longest a request waits for the router."""


class GlobalQuotas:
    """Gives out permits at one ingress."""

    def __init__(self, *, app: str, ingress: str, router: Callable[[], Any]) -> None:
        """`router` returns the router's handle, None while it is silent."""
        self._app = app
        self._ingress = ingress
        self._router = router
        self._book = QuotaBook(expiry_s=float("inf"))
        """Quota book of this ingress alone."""

    async def acquire(self, key: ApiKey, permit: str) -> Standing:
        quota = _quota_of(key)
        standing = self._book.acquire(
            key.name, quota, permit=permit, ingress=self._ingress, time_s=time.monotonic()
        )
        router = self._router()
        if standing.refusal or router is None:
            return standing
        try:
            everyones = await self._answer_of(
                acquired(
                    router,
                    app=self._app,
                    caller=key.name,
                    quota=quota,
                    permit=permit,
                    ingress=self._ingress,
                    timeout_s=_ASK_S,
                )
            )
        except BaseException:  # the client left
            self.release(Permit(key=key, name=permit))
            raise
        if everyones is not None and everyones.refusal:
            self._return(key.name, permit, num_tokens=0)
        return everyones or standing

    async def reserve(self, permit: Permit, num_tokens: int) -> Standing:
        """Reserves so many tokens for a request, in place of those reserved for it before; a
        refusal leaves the latter."""
        if permit.key.tokens_per_minute is None:
            return Standing()
        quota = _quota_of(permit.key)
        standing = self._reserve(permit, quota, num_tokens)
        router = self._router()
        if not standing.refusal and router is not None:
            everyones = await self._answer_of(
                reserved(
                    router,
                    app=self._app,
                    caller=permit.key.name,
                    quota=quota,
                    permit=permit.name,
                    ingress=self._ingress,
                    num_tokens=num_tokens,
                    timeout_s=_ASK_S,
                )
            )
            if everyones is not None and everyones.refusal:
                self._reserve(permit, Quota(), permit.num_reserved)
            standing = everyones or standing
        if not standing.refusal:
            permit.num_reserved = num_tokens
        return standing

    def release(self, permit: Permit) -> None:
        """Does not wait for the router: it is told all permits in use every two seconds."""
        name, used = permit.key.name, permit.num_tokens
        self._return(name, permit.name, num_tokens=used)
        router = self._router()
        if router is not None:
            router.release.remote(self._app, name, permit.name, self._ingress, used)

    async def _answer_of(self, asking: Awaitable[Standing]) -> Standing | None:
        """Returns the router's answer; None without one."""
        try:
            return await asking
        except EngineError as error:
            logger.warning("limits of this ingress alone hold: error=%s", error)
            return None

    def _reserve(self, permit: Permit, quota: Quota, num_tokens: int) -> Standing:
        return self._book.reserve(
            permit.key.name,
            quota,
            permit=permit.name,
            ingress=self._ingress,
            num_tokens=num_tokens,
            time_s=time.monotonic(),
        )

    def _return(self, caller: str, permit: str, *, num_tokens: int) -> None:
        self._book.release(
            caller,
            permit=permit,
            ingress=self._ingress,
            num_tokens=num_tokens,
            time_s=time.monotonic(),
        )

    def held(self) -> Held:
        return self._book.held_by(self._ingress)


def _quota_of(key: ApiKey) -> Quota:
    return Quota(
        max_concurrent=key.max_concurrent_requests, tokens_per_minute=key.tokens_per_minute
    )
