"""An ingress over pipelines that refuse, freeze or vanish: it asks on, and waits for none of them.

The pipelines are generators in this process, behind the two calls of Serve's handle that are used.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from typing import Any, cast

import pytest
import ray

from eesd_dist.errors import EesdError, Migrated, PeerLost
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Emission, FinishReason, Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.messages import StreamItem
from serve_app.config import RecoveryConfig
from serve_app.ingress import pipeline_client
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.pipeline_client import ServiceClient, answered, next_of
from serve_app.pipeline.deployment import Admitted

REQUEST = Request(request_id=RequestId("r"), prompt=(TokenId(1),), sampling=SamplingParams())
LAST = (
    Emission(
        request_id=REQUEST.request_id,
        tokens=(TokenId(5),),
        num_accepted=0,
        finish_reason=FinishReason.STOP,
    ),
)
Answer = Callable[[dict[str, Any]], AsyncGenerator[Admitted | StreamItem, None]]


class Responses:
    """What Serve gives back for a streaming call."""

    def __init__(self, items: AsyncGenerator[Admitted | StreamItem, None]) -> None:
        self._items = items
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Admitted | StreamItem]:
        return self

    async def __anext__(self) -> Admitted | StreamItem:
        return await anext(self._items)

    def cancel(self) -> None:
        self.is_cancelled = True


class CancelCalls:
    """Of the cancellations sent; the first answer comes from another pipeline."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    async def remote(self, request_id: RequestId, attempt: int, sender: str, *, target: str) -> str:
        self.told.append((request_id, attempt, sender, target))
        return target if len(self.told) > 1 else "another"


class Handle:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.calls: list[dict[str, Any]] = []
        self.responses: list[Responses] = []
        self.cancel_calls = CancelCalls()

    def options(self, *, stream: bool) -> "Handle":
        assert stream
        return self

    @property
    def stream(self) -> "Handle":
        return self

    @property
    def cancel(self) -> "CancelCalls":
        return self.cancel_calls

    def remote(self, request: Request, **how: Any) -> Responses:
        self.calls.append(how)
        self.responses.append(Responses(self._answer(how)))
        return self.responses[-1]


class Lookout:
    """A load balancer that knows no pipeline and records losses."""

    num_usable = 1
    sender = "this ingress"

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.gone: set[str] = set()

    def start(self) -> None:
        return

    def choose(
        self, tokens: Sequence[int], *, migrated: Migrated | None, refused: Collection[str]
    ) -> None:
        del tokens, migrated
        self.refused.update(refused)

    def admitted(self, choice: object, *, by: str) -> None:
        return

    def ended(self, pipeline: str, tokens: Sequence[int]) -> None:
        return

    def lost(self, pipeline: str) -> None:
        self.gone.discard(pipeline)

    def is_gone(self, pipeline: str) -> bool:
        return pipeline in self.gone


async def _tokens(handle: Handle, lookout: Lookout) -> list[int]:
    client = ServiceClient(
        handle,
        recovery=RecoveryConfig(stream_pause_s=2.0, max_interruptions=1),
        tracing=Tracing(),
        load_balancer=cast(LoadBalancer, lookout),
    )
    return [token async for e in client.stream(REQUEST) for token in e.tokens]


def test_a_pipeline_that_refuses_since_it_knows_another_is_made_to_take_the_stream() -> None:
    async def answer(how: dict[str, Any]) -> AsyncGenerator[Admitted | StreamItem, None]:
        yield Admitted(pipeline="draining", address="a")
        yield (
            LAST if how["must_take"] else Migrated(by="draining", to=None, reason="drained by hand")
        )

    handle, lookout = Handle(answer), Lookout()
    assert asyncio.run(_tokens(handle, lookout)) == [5]
    assert [call["must_take"] for call in handle.calls] == [False, True]
    assert lookout.refused == Counter({"draining": 1})


def test_a_stream_behind_a_link_that_failed_is_cancelled_and_sent_again_as_a_newer_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(how: dict[str, Any]) -> AsyncGenerator[Admitted | StreamItem, None]:
        yield Admitted(pipeline="p", address="a")
        if how["attempt"] == 1:
            raise ray.exceptions.ActorUnavailableError("a blip", b"0" * 16)
        yield LAST

    async def read() -> list[int]:
        tokens = await _tokens(handle, Lookout())
        await asyncio.sleep(0.1)
        return tokens

    monkeypatch.setattr(pipeline_client, "_ASK_AGAIN_S", 0.01)
    handle = Handle(answer)
    assert asyncio.run(read()) == [5]
    assert [call["attempt"] for call in handle.calls] == [1, 2]
    assert [r.is_cancelled for r in handle.responses] == [True, False]
    assert handle.cancel_calls.told == [("r", 1, "this ingress", "a")] * 2, (
        "until the right one has heard"
    )


def test_a_silent_stream_goes_on_in_another_pipeline_once_its_pipeline_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline_client, "_LISTEN_S", 0.05)
    lookout = Lookout()

    async def answer(how: dict[str, Any]) -> AsyncGenerator[Admitted | StreamItem, None]:
        yield Admitted(pipeline="p", address="a")
        if how["attempt"] == 1:
            lookout.gone.add("p")
            await asyncio.Event().wait()
        await asyncio.sleep(0.2)  # slow, and there
        yield LAST

    handle = Handle(answer)
    assert asyncio.run(_tokens(handle, lookout)) == [5]
    assert [r.is_cancelled for r in handle.responses] == [True, False]


def test_a_timeout_of_the_items_own_is_not_taken_for_a_loss() -> None:
    async def items() -> AsyncGenerator[int, None]:
        yield 1
        raise TimeoutError

    async def read() -> None:
        stream = items()
        assert await next_of(stream, is_gone=lambda: True) == 1
        with pytest.raises(TimeoutError):
            await next_of(stream, is_gone=lambda: True)

    asyncio.run(read())


def test_answers_are_taken_and_frozen_pipelines_are_left_out() -> None:
    async def says(answer: object) -> object:
        if isinstance(answer, EesdError):
            raise answer
        return answer

    async def ask() -> None:
        lost = PeerLost(peer="p", operation="state", reason="dead")
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        frozen = asyncio.Event().wait()
        assert await answered([says(1), frozen, says(lost)], timeout_s=0.1) == (1, lost)
        frozen = asyncio.Event().wait()
        assert await answered([says(2), frozen], timeout_s=60.0, rest_s=0.05) == (2,)
        assert loop.time() - since_s < 10.0
        with pytest.raises(TimeoutError):
            await answered([asyncio.Event().wait()], timeout_s=0.05)
        assert await answered([], timeout_s=0.05) == ()

    asyncio.run(ask())
