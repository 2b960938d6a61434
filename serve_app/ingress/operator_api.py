"""The operators' endpoints: what the service does now, and draining.

Changes need a service with an API key. Without one, any web page that a browser on this machine has
open could ask for them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Protocol

from fastapi import APIRouter, Query
from ray.exceptions import RayError

from eesd_dist.errors import EngineError
from serve_app.ingress.shared import Shared
from serve_app.openai.api import Degraded, Health
from serve_app.openai.errors import KeyRequired
from serve_app.openai.middleware.gate import OPERATORS

_MAX_TRACES = 100
Json = dict[str, object]
Part = Callable[[], Awaitable[Json]]


class Operated(Protocol):
    """A service, as operators see it."""

    async def state(self) -> Json: ...
    async def pipelines(self) -> Json: ...
    async def controllers(self) -> Json: ...
    async def rounds(self) -> Json: ...
    async def traces(self, limit: int) -> Json: ...
    async def trace(self, request_id: str) -> Json: ...
    async def drain(self, name: str) -> Json: ...
    async def undrain(self, name: str) -> Json: ...


class SharedState:
    """Health, pipelines and controllers in one object, made at most once in `period_s`, however
    many ask for it."""

    def __init__(
        self, health: Health, pipelines: Part, controllers: Part, *, period_s: float = 1.0
    ) -> None:
        self._health = health
        self._pipelines = pipelines
        self._controllers = controllers
        self._shared = Shared(self._new, period_s=period_s)

    async def __call__(self) -> Json:
        return await self._shared()

    async def _new(self) -> Json:
        reason, pipelines, controllers = await asyncio.gather(
            self._health(), _or_error(self._pipelines), _or_error(self._controllers)
        )
        status = "ready" if reason is None else "unavailable"
        if isinstance(reason, Degraded):
            status = "degraded"
        return {
            "unix_s": time.time(),
            "health": {"status": status, "reason": reason},
            **pipelines,
            "controllers": controllers,
        }


async def _or_error(fetch: Part) -> Json:
    """Returns what can be known: a part of the service may be away."""
    try:
        return await fetch()
    except (EngineError, RayError, TimeoutError) as error:
        return {"error": str(error) or "no answer in time"}


def operator_router(service: Operated, *, has_key: bool) -> APIRouter:
    """Returns the routes below `/debug/`."""
    router = APIRouter(prefix=OPERATORS.rstrip("/"))

    @router.get("/state", response_model=None)
    async def state() -> Json:
        """Health, pipelines, their processes, and controllers in one object, at most a second old:
        what the console shows."""
        return await service.state()

    @router.get("/pipelines", response_model=None)
    async def pipelines() -> Json:
        """The pipelines and their processes, what starting ones wait for, and why there are as
        many."""
        return await service.pipelines()

    @router.get("/controllers", response_model=None)
    async def controllers() -> Json:
        """Beliefs about acceptance, by workload class, and the controllers that use them."""
        return await service.controllers()

    @router.get("/rounds", response_model=None)
    async def rounds() -> Json:
        """Shows where the time of the latest rounds went."""
        return await service.rounds()

    @router.get("/traces", response_model=None)
    async def traces(limit: Annotated[int, Query(ge=1, le=_MAX_TRACES)] = 10) -> Json:
        """The latest traced requests, each with its spans in all processes."""
        return await service.traces(limit)

    @router.get("/traces/{request_id:path}", response_model=None)
    async def trace(request_id: str) -> Json:
        """A traced request with its spans, by X-Request-Id or by the id of the answer."""
        return await service.trace(request_id)

    @router.post("/pipelines/{name}/drain", response_model=None)
    async def drain(name: str) -> Json:
        """Moves a pipeline's streams to others; it gets no requests. Answers when they have
        left."""
        _require(has_key)
        return await service.drain(name)

    @router.post("/pipelines/{name}/undrain", response_model=None)
    async def undrain(name: str) -> Json:
        """Sends requests to a drained pipeline again."""
        _require(has_key)
        return await service.undrain(name)

    return router


def _require(has_key: bool) -> None:
    if not has_key:
        raise KeyRequired
