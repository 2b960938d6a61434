"""The number of pipelines, for Serve's autoscaler: what the router wants.

The router knows the load of the pipelines and how many requests wait at ingresses, also while there
is no pipeline; the decision is `eesd_dist.routing.fleet`. Serve calls the policy ten times a second
in its controller's event loop, so it never waits: it returns the router's last answer, and asks
again. While the router is silent the number stays.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from eesd_dist.errors import EesdError
from eesd_dist.routing.fleet.size import FleetTargets
from serve_app.config import RouterConfig
from serve_app.router.actor import find_router
from serve_app.router.calls import size_of_fleet

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
_SILENCE_S = 5.0
"""An older answer of the router does not count."""


class FleetPolicy:
    """Serve's policy of the deployment of pipelines; Serve builds it in its controller."""

    def __init__(
        self, *, app: str, router: str, namespace: str, targets: Mapping[str, Any]
    ) -> None:
        """`targets` are the fields of `FleetTargets`: Serve passes plain JSON."""
        self._app = app
        self._config = RouterConfig(name=router, namespace=namespace)
        self._targets = FleetTargets(**targets)
        self._router: Any = None
        self._size: int | None = None
        """The router's last answer; None before the first."""
        self._answered_s = 0.0
        self._request_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._is_silent = False

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the number of pipelines, and no state. `context`: Serve's AutoscalingContext."""
        time_s, count = time.monotonic(), int(context.target_num_replicas)
        is_asking = self._asking is not None and not self._asking.done()
        if not is_asking and time_s - self._request_s >= _PERIOD_S:
            self._request_s = time_s
            self._asking = asyncio.ensure_future(self._ask(count))
        if self._size is None or time_s - self._answered_s > _SILENCE_S:
            return count, {}
        return self._size, {}

    async def _ask(self, count: int) -> None:
        try:
            if self._router is None:
                self._router = await asyncio.to_thread(find_router, self._config)
            self._size = await size_of_fleet(
                self._router, app=self._app, targets=self._targets, count=count
            )
            self._answered_s = time.monotonic()
            self._is_silent = False
        except (EesdError, RayError) as error:
            self._router = None  # it may have been restarted under its name
            if not self._is_silent:  # once for each silence
                logger.warning("number of pipelines unknown: app=%s error=%s", self._app, error)
            self._is_silent = True
