"""An engine in this process that breaks: every request is told, and every later one."""

import asyncio
import threading
from typing import cast

import pytest

from eesd_dist.engine.core import EngineCore
from eesd_dist.errors import EngineError
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.batch.local_client import LocalClient


class Broken:
    """Breaks with the first request it is given."""

    def __init__(self) -> None:
        self._has_request = threading.Event()

    def add(self, request: Request) -> None:
        del request
        self._has_request.set()

    def step(self) -> None:
        self._has_request.wait(10)
        raise ZeroDivisionError("a bug")

    def abort(self, request_id: RequestId) -> None:
        del request_id

    def close(self) -> None:
        return


async def _read(client: LocalClient, name: str) -> None:
    request = Request(
        request_id=RequestId(name), prompt=(TokenId(1),), sampling=SamplingParams(max_tokens=4)
    )
    async for _ in client.stream(request):
        raise AssertionError("a broken engine gives nothing")


def test_requests_after_the_one_that_broke_the_engine_are_told_so() -> None:
    async def run() -> None:
        client = LocalClient(cast(EngineCore, Broken()), tracing=Tracing())
        for name in ("breaks it", "comes later"):
            with pytest.raises(EngineError, match="ZeroDivisionError: a bug"):
                await asyncio.wait_for(_read(client, name), 5)
        await client.aclose()

    asyncio.run(run())
