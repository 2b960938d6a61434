"""Permits for requests of keys with limits, over all ingresses together.

The router is asked once for a request, before its body is read. While it is silent this ingress
decides by itself, as if it were the only one: a service without its router is slower, not closed.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from eesd_dist.errors import EngineError
from eesd_dist.routing.quotas import Quota, QuotaBook, Standing
from serve_app.keys import ApiKey, Permit
from serve_app.router import acquired

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
        """Of this ingress alone."""

    async def acquire(self, key: ApiKey, permit: str) -> Standing:
        quota = Quota(
            max_concurrent=key.max_concurrent_requests, tokens_per_minute=key.tokens_per_minute
        )
        mine = self._book.acquire(
            key.name, quota, permit=permit, ingress=self._ingress, now_s=time.monotonic()
        )
        router = self._router()
        if mine.refused or router is None:
            return mine
        try:
            everyones = await acquired(
                router,
                app=self._app,
                caller=key.name,
                quota=quota,
                permit=permit,
                ingress=self._ingress,
                timeout_s=_ASK_S,
            )
        except EngineError as error:
            logger.warning("limits of this ingress alone hold: error=%s", error)
            return mine
        except BaseException:  # the client left
            self.release(Permit(key=key, name=permit))
            raise
        if everyones.refused:
            self._return(key.name, permit, num_tokens=0)
        return everyones

    def release(self, permit: Permit) -> None:
        """Does not wait for the router: it is told all permits in use every two seconds."""
        name, used = permit.key.name, permit.num_tokens
        self._return(name, permit.name, num_tokens=used)
        router = self._router()
        if router is not None:
            router.release.remote(self._app, name, permit.name, self._ingress, used)

    def _return(self, caller: str, permit: str, *, num_tokens: int) -> None:
        self._book.release(
            caller,
            permit=permit,
            ingress=self._ingress,
            num_tokens=num_tokens,
            now_s=time.monotonic(),
        )

    def held(self) -> Mapping[str, Collection[str]]:
        return self._book.held_by(self._ingress)
