"""Permits at two ingresses with one router, which may be silent, slow or new."""

import asyncio
from dataclasses import dataclass, field

import pytest

from eesd_dist.config import SpeculationConfig
from eesd_dist.routing.quotas import Standing
from serve_app.config import RouterConfig
from serve_app.ingress import quotas
from serve_app.ingress.quotas import GlobalQuotas
from serve_app.openai.keys import ApiKey, Permit
from serve_app.router.actor import Router
from tests.support.in_process import Fault, ToyHandle

KEY = ApiKey(name="c", sha256="0" * 64, max_concurrent_requests=2, tokens_per_minute=600)


def new_router() -> ToyHandle:
    return ToyHandle(Router(RouterConfig(), SpeculationConfig()))


@dataclass
class Site:
    """Two ingresses and their router."""

    router: ToyHandle | None = field(default_factory=new_router)

    def __post_init__(self) -> None:
        self.ingresses = [
            GlobalQuotas(app="a", ingress=name, router=lambda: self.router)
            for name in ("one", "two")
        ]
        self.num_asked = 0

    async def acquire(self, ingress: int) -> tuple[Standing, Permit]:
        self.num_asked += 1
        permit = Permit(key=KEY, name=f"p{self.num_asked}")
        return await self.ingresses[ingress].acquire(KEY, permit.name), permit

    async def release(self, ingress: int, permit: Permit) -> None:
        self.ingresses[ingress].release(permit)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_limits_hold_over_both_ingresses() -> None:
    async def run() -> None:
        site = Site()
        _, first = await site.acquire(0)
        await site.acquire(1)
        refusal, _ = await site.acquire(0)
        assert (refusal.refusal, refusal.num_running) == ("concurrency", 2)
        await site.release(0, first)
        standing, _ = await site.acquire(1)
        assert standing.refusal is None

    asyncio.run(run())


def test_tokens_used_at_one_ingress_are_missing_at_the_other() -> None:
    async def run() -> None:
        site = Site()
        _, permit = await site.acquire(0)
        permit.num_prompt_tokens, permit.num_generated_tokens = 500, 200
        await site.release(0, permit)
        standing, _ = await site.acquire(1)
        assert standing.refusal == "tokens"
        assert 9 < standing.wait_s < 11

    asyncio.run(run())


def test_while_the_router_is_silent_each_ingress_keeps_the_limits_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "_ASK_S", 0.05)

    async def run() -> None:
        for silence in ("none", "slow", "dead"):
            site = Site()
            if silence == "none":
                site.router = None
            elif silence == "slow":
                site.router.fault = lambda _: Fault.SILENT  # type: ignore[union-attr]
            else:
                site.router.die()  # type: ignore[union-attr]
            for ingress in (0, 1):
                for _ in range(2):
                    standing, _ = await site.acquire(ingress)
                    assert standing.refusal is None, silence
                standing, _ = await site.acquire(ingress)
                assert standing.refusal == "concurrency", silence

    asyncio.run(run())


def test_a_new_router_learns_what_is_held() -> None:
    async def run() -> None:
        site = Site()
        await site.acquire(0)
        await site.acquire(1)
        site.router = new_router()
        for name, ingress in zip(("one", "two"), site.ingresses, strict=True):
            await site.router.hold.remote("a", name, ingress.held())
        standing, _ = await site.acquire(0)
        assert standing.refusal == "concurrency"

    asyncio.run(run())


def test_a_request_that_is_given_up_while_the_router_is_asked_holds_nothing() -> None:
    async def run() -> None:
        site = Site()
        site.router.fault = lambda _: Fault.SILENT  # type: ignore[union-attr]
        asking = asyncio.ensure_future(site.acquire(0))
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert site.ingresses[0].held() == {}

    asyncio.run(run())


def test_a_permit_of_which_the_reply_was_lost_comes_back() -> None:
    async def run() -> None:
        site = Site()
        lost = [Fault.REPLY_LOST]
        site.router.fault = lambda _: lost.pop() if lost else None  # type: ignore[union-attr]
        standing, permit = await site.acquire(0)
        assert standing.refusal is None, "the ingress has decided"
        await site.acquire(0)
        await site.release(0, permit)
        standing, _ = await site.acquire(1)
        assert standing.refusal is None

    asyncio.run(run())
