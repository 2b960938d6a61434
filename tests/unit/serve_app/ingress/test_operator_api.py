"""The state that all readers share."""

import asyncio

import pytest

from eesd_dist.errors import EngineError
from serve_app.ingress.operator_api import Json, SharedState
from serve_app.openai.api import Degraded


class Parts:
    """What a state is made of, counted."""

    def __init__(self, *, health: str | None = None, controllers: Exception | None = None) -> None:
        self.num_made = 0
        self._health = health
        self._error = controllers

    async def health(self) -> str | None:
        return self._health

    async def pipelines(self) -> Json:
        self.num_made += 1
        await asyncio.sleep(0.01)
        return {"pipelines": [self.num_made]}

    async def controllers(self) -> Json:
        if self._error is not None:
            raise self._error
        return {"pinned": False}

    def state(self, *, period_s: float) -> SharedState:
        return SharedState(self.health, self.pipelines, self.controllers, period_s=period_s)


def test_many_readers_share_one_state_until_it_is_old() -> None:
    async def read() -> tuple[int, int]:
        pages = Parts()
        state = pages.state(period_s=0.5)
        first = await asyncio.gather(*(state() for _ in range(50)))
        assert all(page is first[0] for page in first)
        at_once = pages.num_made
        await asyncio.sleep(0.6)
        assert (await state())["pipelines"] == [2]
        return at_once, pages.num_made

    assert asyncio.run(read()) == (1, 2)


def test_a_reader_that_leaves_does_not_keep_the_others_waiting() -> None:
    async def read() -> Json:
        state = Parts().state(period_s=10.0)
        leaving = asyncio.ensure_future(state())
        await asyncio.sleep(0)
        staying = asyncio.ensure_future(state())
        await asyncio.sleep(0)
        leaving.cancel()
        return await asyncio.wait_for(staying, timeout=5.0)

    assert asyncio.run(read())["pipelines"] == [1]


@pytest.mark.parametrize(
    ("health", "status"),
    [(None, "ready"), (Degraded("plain"), "degraded"), ("loading", "unavailable")],
)
def test_the_state_names_its_health(health: str | None, status: str) -> None:
    state = asyncio.run(Parts(health=health).state(period_s=1.0)())
    assert state["health"] == {"status": status, "reason": health}


def test_a_part_that_is_away_is_an_error_in_its_place() -> None:
    for error, message in (
        (EngineError("no pipeline is running"), "no pipeline is running"),
        (TimeoutError(), "no answer in time"),
    ):
        state = asyncio.run(Parts(controllers=error).state(period_s=1.0)())
        assert state["pipelines"] == [1]
        assert state["controllers"] == {"error": message}
