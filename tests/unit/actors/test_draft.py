"""What the router hears of requests that end before their last token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from eesd_dist.actors.contracts import (
    Address,
    Generation,
    RouterAdvice,
    RouterNews,
    StreamItem,
    TelemetryOptions,
)
from eesd_dist.actors.draft import DraftActor
from eesd_dist.config import EngineConfig
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from tests.support.toy_stages import toy_stages


def _request(name: str) -> Request:
    sampling = SamplingParams(max_tokens=1000)
    return Request(request_id=RequestId(name), prompt=(TokenId(1),), sampling=sampling)


class Router:
    def __init__(self) -> None:
        self.live: set[str] = set()
        self.met: list[str] = []

    async def __call__(self, news: RouterNews) -> RouterAdvice:
        self.met += [request_id for request_id, _ in news.admitted]
        self.live |= {request_id for request_id, _ in news.admitted}
        self.live |= {outcome.request_id for outcome in news.outcomes}
        self.live -= set(news.finished)
        return RouterAdvice(plans={})


async def _some(items: AsyncIterator[StreamItem]) -> None:
    async for item in items:
        assert isinstance(item, tuple)
        return


def test_the_router_hears_the_end_of_requests_that_are_cancelled_left_or_refused() -> None:
    async def run() -> None:
        router = Router()
        config = EngineConfig.model_validate(
            {"model": {"path": "."}, "scheduler": {"max_waiting": 2}}
        )
        actor = DraftActor(
            config,
            name="p",
            stages=toy_stages,
            telemetry=TelemetryOptions(model_name="toy"),
            ask_router=router,
        )
        store = Address(host="nowhere", port=1)
        await actor.join(Generation(number=1, store=store, num_verify_ranks=1, timeout_s=1.0))
        left, cancelled = actor.submit(_request("left")), actor.submit(_request("cancelled"))
        async with aclosing(cancelled):
            async with aclosing(left):
                await _some(left)
                await _some(cancelled)
                refusal = [item async for item in actor.submit(_request("refused"))]
                assert type(refusal[0]).__name__ == "QueueFull"
            await actor.cancel(RequestId("cancelled"))
            assert [item async for item in cancelled]
        await asyncio.sleep(0.3)
        assert router.live == set()
        assert sorted(router.met) == ["cancelled", "left"]
        assert await actor.leave()

    asyncio.run(run())
