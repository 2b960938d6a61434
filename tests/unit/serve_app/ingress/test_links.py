"""A link over calls that fail: no token is lost or repeated, no stream waits for a dead actor."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, Migrated, PeerLost
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers import drafting_actor
from serve_app.ingress.links import Link, Links
from tests.support.in_process import Fault, ToyHandle, joined_actor
from tests.support.toy_stages import TOKENS_PER_ROUND, held, toy_token

CONFIG = EngineConfig.model_validate({"model": {"path": "."}})


def _request(name: str = "r", *, max_tokens: int = 40, submission: int = 1) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=(TokenId(1),),
        sampling=SamplingParams(max_tokens=max_tokens),
        submission=submission,
    )


def _text(request: Request) -> list[int]:
    return [toy_token(request, 1 + i) for i in range(request.sampling.max_tokens)]


@asynccontextmanager
async def _linked(
    *, silence_s: float = 10.0, config: EngineConfig = CONFIG
) -> AsyncIterator[tuple[ToyHandle, Link]]:
    handle = ToyHandle(await joined_actor(config))
    link = Link("p", handle, silence_s=silence_s)
    try:
        async with asyncio.timeout(30.0):
            yield handle, link
    finally:
        await link.close()
        assert await handle.actor.leave()


async def _read(link: Link, request: Request) -> tuple[list[int], EesdError | None]:
    """Returns the tokens of the stream, and the error that ended it."""
    tokens: list[int] = []
    async with aclosing(link.stream(request)) as items:
        async for item in items:
            if isinstance(item, EesdError):
                return tokens, item
            tokens += [token for emission in item for token in emission.tokens]
    return tokens, None


def test_one_call_reads_the_rounds_of_all_streams() -> None:
    async def run() -> None:
        async with _linked() as (handle, link):
            requests = [_request(str(i)) for i in range(10)]
            read = await asyncio.gather(*[_read(link, request) for request in requests])
            assert read == [(_text(request), None) for request in requests]
            num_rounds = requests[0].sampling.max_tokens // TOKENS_PER_ROUND
            assert handle.calls.count("take") < 2 * num_rounds, "there were 10 streams"
            assert handle.calls.count("cancel") == 0
            assert link.num_live == 0

    asyncio.run(run())


def test_no_call_is_one_of_the_request_that_ray_cancels_when_its_client_leaves() -> None:
    of_request: ContextVar[bool] = ContextVar("of_request", default=False)
    calls: dict[str, bool] = {}

    async def run() -> None:
        async with _linked() as (handle, link):
            handle.fault = lambda method: calls.update({method: of_request.get()})
            of_request.set(True)
            async with aclosing(link.stream(_request())) as items:
                await anext(items)
            await asyncio.sleep(0.05)

    asyncio.run(run())
    assert calls == {"submit": False, "take": False, "cancel": False}


@pytest.mark.parametrize("fault", [Fault.UNREACHED, Fault.REPLY_LOST])
def test_calls_that_fail_lose_and_repeat_no_token(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.ingress.links._RETRY_S", 0.01)

    async def run() -> None:
        async with _linked() as (handle, link):
            faults = cycle([fault, None, fault, fault])
            handle.fault = lambda method: next(faults) if method == "take" else None
            requests = [_request(str(i), max_tokens=20 * i) for i in range(1, 4)]
            read = await asyncio.gather(*[_read(link, request) for request in requests])
            assert read == [(_text(request), None) for request in requests]
            assert not link.is_lost

    asyncio.run(run())


def test_a_dead_actor_ends_the_streams_as_lost_and_the_link_with_them() -> None:
    async def run() -> None:
        async with _linked() as (handle, link):
            reading = [asyncio.ensure_future(_read(link, _request(name))) for name in "ab"]
            await asyncio.sleep(0.2)
            handle.die()
            for tokens, error in await asyncio.gather(*reading):
                assert isinstance(error, PeerLost)
                assert tokens == _text(_request())[: len(tokens)]
            assert link.is_lost
            assert isinstance((await _read(link, _request("late")))[1], PeerLost)

    asyncio.run(run())


@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.UNREACHED])
def test_an_actor_that_is_silent_for_too_long_is_lost(fault: Fault) -> None:
    async def run() -> None:
        async with _linked(silence_s=0.6) as (handle, link):
            reading = asyncio.ensure_future(_read(link, _request(max_tokens=100_000)))
            await asyncio.sleep(0.2)
            handle.fault = lambda _: fault
            await asyncio.sleep(0.3)
            assert not reading.done()
            tokens, error = await reading
            assert tokens
            assert isinstance(error, PeerLost)
            assert "no answer within 0.6 s" in str(error)
            assert link.is_lost

    asyncio.run(run())


def test_a_stream_without_news_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting_actor, "TAKE_WAIT_S", 0.1)
    config = EngineConfig.model_validate({"model": {"path": str(tmp_path)}})

    async def run() -> None:
        async with _linked(silence_s=0.4, config=config) as (_, link):
            with held(config, at=10):
                reading = asyncio.ensure_future(_read(link, _request()))
                await asyncio.sleep(1.2)
                assert not reading.done()
            assert await reading == (_text(_request()), None)

    asyncio.run(run())


def test_a_bug_in_the_other_process_ends_the_streams_too() -> None:
    async def run() -> None:
        async with _linked() as (handle, link):
            reading = asyncio.ensure_future(_read(link, _request(max_tokens=100_000)))
            await asyncio.sleep(0.1)

            async def take(*_: object) -> None:
                raise ValueError("a bug")

            handle.actor.take = take
            _, error = await reading
            assert isinstance(error, PeerLost)
            assert "a bug" in str(error)

    asyncio.run(run())


def test_an_error_of_a_stream_comes_after_its_tokens_and_ends_no_other() -> None:
    async def run() -> None:
        async with _linked() as (handle, link):
            first, second = _request("one"), _request("two", max_tokens=60)
            reading = [asyncio.ensure_future(_read(link, request)) for request in (first, second)]
            await asyncio.sleep(0.2)
            moved = Migrated(by="p", to="q", reason="test")
            await handle.actor.evict([first.request_id], moved)
            tokens, error = await reading[0]
            assert tokens == _text(first)[: len(tokens)] != []
            assert isinstance(error, Migrated)
            assert await reading[1] == (_text(second), None)
            retry = replace(_request("one"), submission=2)
            assert await _read(link, retry) == (_text(retry), None)

    asyncio.run(run())


def test_a_stream_that_is_closed_is_cancelled_though_the_cancellation_is_lost() -> None:
    async def run() -> None:
        async with _linked() as (handle, link):
            is_lost = iter([Fault.UNREACHED, Fault.REPLY_LOST])
            handle.fault = lambda method: next(is_lost, None) if method == "cancel" else None
            async with aclosing(link.stream(_request(max_tokens=100_000))) as items:
                await anext(items)
            await asyncio.sleep(0.5)
            assert await handle.actor.live() == ()
            assert 2 <= handle.calls.count("cancel") <= 4

    asyncio.run(run())


@pytest.mark.parametrize("fault", [Fault.UNREACHED, Fault.REPLY_LOST])
def test_a_submission_that_fails_is_a_loss_and_leaves_nothing_behind(fault: Fault) -> None:
    async def run() -> None:
        async with _linked() as (handle, link):
            handle.fault = lambda method: fault if method == "submit" else None
            tokens, error = await _read(link, _request(max_tokens=100_000))
            assert isinstance(error, PeerLost)
            assert "not submitted" in str(error)
            assert tokens == []
            assert not link.has_admitted(_request().submission)
            await asyncio.sleep(0.3)
            assert await handle.actor.live() == ()
            handle.fault = lambda _: None
            retry = _request(submission=2)
            assert await _read(link, retry) == (_text(retry), None), "the link is not lost"
            assert link.has_admitted(2)

    asyncio.run(run())


def test_streams_that_were_read_too_late_end_as_lost_and_later_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting_actor, "_LOOK_S", 0.05)
    monkeypatch.setattr(drafting_actor, "_UNREAD_S", 0.2)

    async def run() -> None:
        async with _linked() as (handle, link):
            reading = asyncio.ensure_future(_read(link, _request(max_tokens=100_000)))
            await asyncio.sleep(0.2)
            handle.fault = lambda method: Fault.UNREACHED if method == "take" else None
            await asyncio.sleep(3.0)  # the call that was under way is over after 2 s
            handle.fault = lambda _: None
            tokens, error = await reading
            assert tokens == [toy_token(_request(), 1 + i) for i in range(len(tokens))]
            assert "it was read too late" in str(error)
            retry = _request(submission=2)
            assert await _read(link, retry) == (_text(retry), None)
            assert not link.is_lost

    asyncio.run(run())


def test_a_pipeline_with_another_leader_has_another_link_and_streams_of_the_old_one_end() -> None:
    async def run() -> None:
        links = Links(silence_s=10.0)
        actors = {name: ToyHandle(await joined_actor(CONFIG)) for name in ("old", "new", "other")}

        def to(leader: str, pipeline: str) -> Link:
            return links.to(pipeline=pipeline, leader=leader, address=actors[leader])

        old, other = to("old", "p"), to("other", "q")
        assert to("old", "p") is old
        long = _request(max_tokens=100_000)
        reading = asyncio.ensure_future(_read(old, long))
        staying = asyncio.ensure_future(_read(other, _request("stays")))
        await asyncio.sleep(0.1)
        links.keep({"p": "old"})
        await asyncio.sleep(0.1)
        assert not reading.done()
        links.keep({"p": "new"})
        _, error = await reading
        assert isinstance(error, PeerLost)
        assert "another process has its place" in str(error)
        assert await staying == (_text(_request("stays")), None), "a pipeline that is not listed"
        assert to("old", "p") is not old
        links.keep({"p": "new"})
        new = to("new", "p")
        assert await _read(new, _request()) == (_text(_request()), None)
        links.keep({"p": "new"})
        assert to("new", "p") is new
        for link in (old, other, new):
            await link.close()
        for handle in actors.values():
            assert await handle.actor.leave()

    asyncio.run(run())
