"""Results that many ask for at once."""

import asyncio
from contextvars import ContextVar

import pytest

from eesd_dist.errors import EngineError
from serve_app.ingress.shared import Shared

_request: ContextVar[str] = ContextVar("request", default="none")


class _Page:
    """A page with the number of times that it was made, and the request that it is made in."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_made = 0
        self.fails = fails

    async def __call__(self) -> str:
        self.num_made += 1
        await asyncio.sleep(0.05)
        if self.fails:
            raise EngineError("no pipeline is running")
        return f"{self.num_made} for {_request.get()}"


def test_it_is_made_once_in_a_period_for_all_requests() -> None:
    async def run() -> None:
        page, clock_s = _Page(), 0.0
        shared = Shared(page, period_s=1.0, clock=lambda: clock_s)
        for at_s, number in ((5.0, 1), (5.9, 1), (6.0, 2), (6.9, 2)):
            clock_s = at_s
            pages = set(await asyncio.gather(*(shared() for _ in range(50))))
            assert pages == {f"{number} for none"}
        assert page.num_made == 2

    asyncio.run(run())


def test_it_belongs_to_no_request_and_the_first_may_leave() -> None:
    async def run() -> None:
        shared = Shared(_Page(), period_s=10.0)
        _request.set("the first")
        leaving = asyncio.ensure_future(shared())
        await asyncio.sleep(0.01)
        staying = asyncio.ensure_future(shared())
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert await asyncio.wait_for(staying, timeout=5.0) == "1 for none"

    asyncio.run(run())


def test_an_error_is_shared_and_does_not_stay() -> None:
    async def run() -> None:
        page, clock_s = _Page(fails=True), 5.0
        shared = Shared(page, period_s=1.0, clock=lambda: clock_s)
        answers = await asyncio.gather(*(shared() for _ in range(9)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {EngineError}
        with pytest.raises(EngineError):
            await shared()
        assert page.num_made == 1
        clock_s, page.fails = 6.0, False
        assert await shared() == "2 for none"

    asyncio.run(run())
