"""A client of an engine in this process: rounds come fast or slowly, and one breaks it."""

import asyncio
import threading
import time
from typing import cast

import pytest

from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.errors import EngineError
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import (
    Emission,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    TokenId,
)
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


class Counting:
    """Emits 0, 1, 2, ... a token a round."""

    def __init__(self, *, num_tokens: int, round_s: float) -> None:
        self._num_tokens = num_tokens
        self._round_s = round_s
        self._request: Request | None = None
        self._number = 0

    def add(self, request: Request) -> None:
        self._request = request

    def step(self) -> StepResult:
        time.sleep(self._round_s)
        request, number = self._request, self._number
        if request is None or number == self._num_tokens:
            return StepResult()
        self._number += 1
        emission = Emission(
            request_id=request.request_id,
            submission=request.submission,
            tokens=(TokenId(number),),
            num_accepted=0,
            finish_reason=FinishReason.LENGTH if self._number == self._num_tokens else None,
        )
        return StepResult(emissions=(emission,))

    def abort(self, request_id: RequestId) -> None:
        del request_id

    def close(self) -> None:
        return


@pytest.mark.parametrize(("round_s", "is_held"), [(0.001, True), (0.2, False)])
def test_no_round_is_lost_and_only_those_that_follow_soon_are_waited_for(
    round_s: float, is_held: bool
) -> None:
    async def run() -> list[tuple[int, float]]:
        engine = Counting(num_tokens=5, round_s=round_s)
        client = LocalClient(cast(EngineCore, engine), tracing=Tracing())
        request = Request(
            request_id=RequestId("x"), prompt=(TokenId(1),), sampling=SamplingParams(max_tokens=5)
        )
        arrivals = [
            (emission.tokens[0], time.monotonic())
            async for emissions in client.stream(request)
            for emission in emissions
        ]
        await client.aclose()
        return arrivals

    arrivals = asyncio.run(run())
    assert [token for token, _ in arrivals] == [0, 1, 2, 3, 4]
    assert (arrivals[-1][1] - arrivals[0][1] < 0.1) == is_held


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
