"""The autoscaling bench notices every stream that breaks, and a watch that has failed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.types import Request, SamplingParams, TokenId
from tests.autoscaling.__main__ import _Phase, _run_phase
from tests.autoscaling.load import Clients, Prompt
from tests.autoscaling.timeline import Timeline

TEXT = (TokenId(5), TokenId(6))
PROMPT = Prompt(tokens=(TokenId(3),), sampling=SamplingParams(max_tokens=2), text=TEXT)
LOST = PeerLost(peer="one", operation="stream", reason="gone")


class ToyClient:
    """Each stream gives the text, unless the function says otherwise."""

    def __init__(self, before_text: Callable[[], Any]) -> None:
        self._before_text = before_text

    async def stream(self, request: Request) -> AsyncIterator[Any]:
        await self._before_text()
        yield (SimpleNamespace(tokens=TEXT),)


def _clients(before_text: Callable[[], Any]) -> Clients:
    client: Any = ToyClient(before_text)
    return Clients(client, [PROMPT])


@pytest.mark.parametrize("error", [LOST, KeyError("tokens"), asyncio.CancelledError()])
def test_any_error_breaks_a_stream_and_its_client_is_replaced(error: BaseException) -> None:
    errors = [error]

    async def fails_once() -> None:
        await asyncio.sleep(0.001)
        if errors:
            raise errors.pop()

    async def run() -> Clients:
        clients = _clients(fails_once)
        clients.keep(2)
        await asyncio.wait([t for t in asyncio.all_tasks() if t.get_name() == "load-0"])
        assert clients.num_live == 1
        clients.keep(2)
        assert clients.num_live == 2
        await clients.end(timeout_s=10.0)
        return clients

    clients = asyncio.run(run())
    assert clients.texts.broken == [f"load-0: {error!r}"]
    assert (clients.num_live, clients.texts.changed) == (0, [])
    assert clients.texts.num_whole >= 2


def test_a_client_that_fails_at_once_fails_once_a_turn() -> None:
    async def fails() -> None:
        raise LOST

    async def run() -> Clients:
        clients = _clients(fails)
        for _ in range(3):
            clients.keep(1)
            await asyncio.sleep(0.05)
        return clients

    assert len(asyncio.run(run()).texts.broken) == 3


@pytest.mark.timeout(30)
def test_the_end_does_not_wait_for_ever() -> None:
    async def run() -> None:
        clients = _clients(asyncio.Event().wait)
        clients.keep(3)
        await clients.end(timeout_s=0.05)

    with pytest.raises(EngineError, match=r"^3 streams still open 0\.05 s after"):
        asyncio.run(run())


@pytest.mark.timeout(30)
def test_a_watch_that_has_failed_ends_the_phase_with_its_error() -> None:
    async def fails() -> None:
        raise LookupError("no such node")

    async def run() -> None:
        phase = _Phase(name="rise", clients=(1,), reached=lambda sample: True)
        loop = asyncio.get_running_loop()
        await _run_phase(
            phase,
            Timeline(clock=loop.time),
            _clients(asyncio.Event().wait),
            watch=asyncio.create_task(fails()),
            timeout_s=600.0,
        )

    with pytest.raises(LookupError, match="no such node"):
        asyncio.run(run())
