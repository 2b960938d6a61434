"""Streams over a drafting actor in this process, with an engine that certain requests break."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from serve_app.pipeline.resume import resumed
from serve_app.pipeline.streams import Streams

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, EngineError, Migrated, PeerLost, PoisonRequest, RequestError
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import (
    Address,
    Epoch,
    ProcessInfo,
    StreamItem,
    TelemetryOptions,
)
from serve_app.config import RecoveryConfig
from serve_app.pipeline.placement import RankSlot
from serve_app.pipeline.workers import Worker
from tests.support.toy_poison import POISON, WAYS, PoisonedStages
from tests.support.toy_stages import held, toy_token

BUG = "bug in the drafting actor"


class _Call:
    """A method of an actor in this process, called as Ray's are."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def options(self, *, num_returns: str) -> "_Call":
        assert num_returns == "streaming"
        return self

    def remote(self, *args: object) -> Any:
        answer = self._method(*args)
        return (
            _references(answer) if hasattr(answer, "__aiter__") else asyncio.ensure_future(answer)
        )


async def _references(items: AsyncIterator[StreamItem]) -> AsyncIterator[Awaitable[StreamItem]]:
    async for item in items:
        done: asyncio.Future[StreamItem] = asyncio.get_running_loop().create_future()
        done.set_result(item)
        yield done


class _Handle:
    def __init__(self, actor: DraftActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> _Call:
        return _Call(getattr(self._actor, name))


class Pipeline:
    """Mends an engine as often as it breaks; its drafting actor outlives its engines."""

    def __init__(
        self,
        folder: Path,
        *,
        find_peer_pipeline: str | None = None,
        round_timeout_s: float = 20.0,
        **recovery: object,
    ) -> None:
        self.config = EngineConfig.model_validate({"model": {"path": str(folder)}})
        self.actor = DraftActor(
            self.config,
            name="p",
            stages=PoisonedStages(),
            telemetry=TelemetryOptions(model_name="toy"),
        )
        self.num_broken = 0
        self.num_delivered = 0
        self.kept: list[int] = []
        """How many streams the actor kept through each interruption."""
        self.worker = Worker(
            slot=RankSlot(name="drafting actor", rank=None, resources={}),
            handle=_Handle(self.actor),
            process_info=ProcessInfo(pid=1, host="here", node_id="n"),
            death=asyncio.get_running_loop().create_future(),
        )
        self.streams = Streams(
            pipeline="p",
            drafter=self._drafter,
            recovery=RecoveryConfig.model_validate({"stream_pause_s": 5.0, **recovery}),
            delivered=self._delivered,
            find_peer_pipeline=self._find_peer_pipeline,
            round_timeout_s=round_timeout_s,
        )
        self._other = find_peer_pipeline

    async def keep(self) -> None:
        store = Address(host="nowhere", port=1)
        for number in range(1, 100):
            await self.actor.join(
                Epoch(number=number, store=store, num_verify_ranks=1, timeout_s=1.0)
            )
            self.streams.resume()
            end = await self.actor.ended()
            assert end.error is not None
            await self.mend(end.error)

    async def mend(self, error: EesdError) -> None:
        self.num_broken += 1
        self.streams.paused(error)
        await self.actor.leave()
        self.kept.append(len(self.actor._mail))
        await self.streams.broke(error, drafter=self.worker)

    async def tokens(self, request: Request, *, sender: str = "", attempt: int = 0) -> list[int]:
        return [
            token
            async for part in self.streams.stream(request, sender=sender, attempt=attempt)
            for emission in part
            for token in emission.tokens
        ]

    async def _drafter(self) -> Worker:
        return self.worker

    async def _find_peer_pipeline(self) -> str | None:
        return self._other

    def _delivered(self) -> None:
        self.num_delivered += 1


@asynccontextmanager
async def _pipeline(folder: Path, **recovery: object) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline(folder, **recovery)
    keeping = asyncio.ensure_future(pipeline.keep())
    try:
        yield pipeline
    finally:
        keeping.cancel()
        await pipeline.actor.leave()


def _request(name: str, *, max_tokens: int) -> Request:
    sampling = SamplingParams(seed=len(name), max_tokens=max_tokens)
    return Request(request_id=RequestId(name), prompt=(TokenId(1), TokenId(2)), sampling=sampling)


def _poison(name: str) -> Request:
    return replace(_request(name, max_tokens=10), prompt=(POISON, WAYS[BUG]))


def _expected(request: Request) -> list[int]:
    return [toy_token(request, 2 + i) for i in range(request.sampling.max_tokens)]


def _good(count: int) -> Iterator[Request]:
    return (_request("g" * (i + 1), max_tokens=20 + i) for i in range(count))


@pytest.mark.parametrize("num_poison", [1, 2])
def test_poison_in_a_crowd_is_refused_and_all_others_get_every_token(
    num_poison: int, tmp_path: Path
) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            good = list(_good(6))
            bad = [_poison(f"bad-{i}") for i in range(num_poison)]
            answers = await asyncio.gather(
                *[pipeline.tokens(request) for request in good + bad], return_exceptions=True
            )
            assert answers[:6] == [_expected(request) for request in good]
            for request, error in zip(bad, answers[6:], strict=True):
                assert isinstance(error, PoisonRequest)
                assert error.request_id == request.request_id
                assert "ValueError: this token is in no vocabulary" in str(error)
            assert pipeline.num_broken == 2 + num_poison
            assert pipeline.streams.num_live == 0
            assert pipeline.streams.num_suspects == 0

    asyncio.run(run())


def test_poison_that_is_alone_is_refused_after_two_engines(tmp_path: Path) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            with pytest.raises(
                PoisonRequest, match="bad is refused: the engine broke 2 times under"
            ):
                await pipeline.tokens(_poison("bad"))
            assert pipeline.num_broken == 2
            request = _request("after", max_tokens=9)
            assert await pipeline.tokens(request) == _expected(request)

    asyncio.run(run())


def test_a_stream_is_kept_in_the_actor_when_a_rank_is_lost(tmp_path: Path) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            request = _request("kept", max_tokens=900)
            parts = pipeline.streams.stream(request)
            tokens = [t for emission in await anext(parts) for t in emission.tokens]
            for _ in range(8):  # with a token in between, as often as you like
                worker = pipeline.actor._running
                assert worker is not None
                worker.thread._settle(_lost_rank())
                await asyncio.sleep(0.1)
                tokens += [t for emission in await anext(parts) for t in emission.tokens]
            assert tokens == _expected(request)[: len(tokens)]
            assert len(tokens) >= 9
            await cast(Any, parts).aclose()
            assert pipeline.kept == [1] * 8

    asyncio.run(run())


def _lost_rank() -> Any:
    from eesd_dist.workers.messages import LoopEnd

    return LoopEnd(error=PeerLost(peer="verify rank 0", operation="round 1", reason="killed"))


def test_streams_migrate_while_a_process_is_replaced_and_suspects_stay(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        pipeline = Pipeline(tmp_path)
        lost = PeerLost(peer="drafting actor", operation="round", reason="its process has died")
        streams = pipeline.streams
        one = asyncio.ensure_future(pipeline.tokens(_request("one", max_tokens=4)))
        two = asyncio.ensure_future(
            pipeline.tokens(replace(_request("two", max_tokens=4), crashes=2))
        )
        await asyncio.sleep(0)
        streams.paused(lost)
        await streams.leave("it is re-forming", drafter=None)
        with pytest.raises(Migrated, match="re-forming") as migrated:
            await one
        assert (migrated.value.by, migrated.value.to, migrated.value.crashes) == ("p", None, 0)
        assert not two.done()
        keeping = asyncio.ensure_future(pipeline.keep())
        assert len(await two) == 4
        keeping.cancel()
        await pipeline.actor.leave()

    asyncio.run(run())


def test_a_stream_waits_so_long_for_a_ready_pipeline_and_no_longer(tmp_path: Path) -> None:
    async def run() -> None:
        pipeline = Pipeline(tmp_path, stream_pause_s=0.1)
        pipeline.streams.paused(EngineError("no such device"))
        with pytest.raises(EngineError, match=r"not ready again after 0\.1 s: no such device"):
            await pipeline.tokens(_request("late", max_tokens=4))

    asyncio.run(run())


def test_a_stream_that_has_waited_long_enough_migrates_where_it_can(tmp_path: Path) -> None:
    async def run() -> None:
        pipeline = Pipeline(tmp_path, find_peer_pipeline="q", stream_pause_s=0.1)
        pipeline.streams.paused(EngineError("no such device"))
        with pytest.raises(Migrated, match=r"unavailable after 0\.1 s"):
            await pipeline.tokens(_request("late", max_tokens=4))

    asyncio.run(run())


def test_a_suspect_is_not_admitted_during_a_long_round_of_the_one_before(tmp_path: Path) -> None:
    async def run(round_timeout_s: float) -> float:
        pipeline = Pipeline(tmp_path, round_timeout_s=round_timeout_s)
        pipeline.streams.resume()
        await pipeline.actor.join(
            Epoch(number=1, store=Address(host="-", port=1), num_verify_ranks=1, timeout_s=1.0)
        )
        other = pipeline.worker.handle.submit.options(num_returns="streaming")
        items = other.remote(_request("still running", max_tokens=100_000))
        await (await anext(items))
        began_s = asyncio.get_running_loop().time()
        await pipeline.streams._until_empty()
        await pipeline.actor.leave()
        return asyncio.get_running_loop().time() - began_s

    assert asyncio.run(run(3.0)) >= 3.0


def test_a_pipeline_that_is_given_up_ends_every_stream(tmp_path: Path) -> None:
    async def run() -> None:
        pipeline = Pipeline(tmp_path)
        answers = [asyncio.ensure_future(pipeline.tokens(request)) for request in _good(3)]
        await asyncio.sleep(0)
        pipeline.streams.give_up(EngineError("it broke 7 times in a row"))
        for answer in answers:
            with pytest.raises(PeerLost, match="7 times in a row"):  # its sender tries another one
                await asyncio.wait_for(answer, 5.0)

    asyncio.run(run())


def test_an_id_in_use_is_refused_and_its_owners_books_are_untouched(tmp_path: Path) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            request = _request("same", max_tokens=20)
            owner = pipeline.streams.stream(request)
            await anext(owner)
            with pytest.raises(RequestError, match="already being served"):
                await pipeline.tokens(request)
            assert pipeline.streams.live == (request.request_id,)
            assert len([part async for part in owner]) > 0

    asyncio.run(run())


def test_a_sender_that_lost_sight_of_its_stream_gets_it_again_in_place_of_the_one_it_lost(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            request = _request("mine", max_tokens=20)
            has_begun = asyncio.Event()

            async def read_for_ever() -> None:
                async with aclosing(pipeline.streams.stream(request, attempt=1)) as parts:
                    async for _ in parts:
                        has_begun.set()
                        await asyncio.Event().wait()  # its reader is behind a dead link

            lost = asyncio.ensure_future(read_for_ever())
            await has_begun.wait()
            again = pipeline.streams.stream(request, attempt=2)
            tokens = [t async for part in again for e in part for t in e.tokens]
            assert tokens == _expected(request)
            assert lost.cancelled()
            assert pipeline.streams.num_live == 0

    asyncio.run(run())


def test_streams_of_a_sender_that_fell_silent_end_in_the_engine_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            good = _request("good", max_tokens=60)
            others = [_request(f"unread-{i}", max_tokens=60) for i in range(3)]
            with held(pipeline.config):
                read = asyncio.ensure_future(pipeline.tokens(good, sender="alive"))
                unread = [asyncio.ensure_future(pipeline.tokens(r, sender="dead")) for r in others]
                await _num_running(pipeline, 4)
                pipeline.streams.cancel_silent(frozenset({"dead", "dead before"}))
                for stream in unread:
                    with pytest.raises(PeerLost, match="its sender was taken for dead"):
                        await asyncio.wait_for(stream, 5.0)
                assert pipeline.streams.live == (good.request_id,)
                await _num_running(pipeline, 1)
            assert await read == _expected(good)

    asyncio.run(run())


def test_streams_of_a_sender_that_fell_silent_end_in_the_queue_too(tmp_path: Path) -> None:
    async def run() -> None:
        pipeline = Pipeline(tmp_path)  # unavailable
        waiting = asyncio.ensure_future(
            pipeline.tokens(_request("unread", max_tokens=60), sender="dead")
        )
        await asyncio.sleep(0.05)
        pipeline.streams.cancel_silent(frozenset({"dead"}))
        await asyncio.wait({waiting}, timeout=1.0)
        assert isinstance(waiting.exception(), PeerLost)
        assert pipeline.streams.num_live == 0

    asyncio.run(run())


def test_a_call_that_serve_repeats_takes_the_place_of_the_first_and_no_other_call_does(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            request = _request("mine", max_tokens=20)
            with held(pipeline.config):
                first = asyncio.ensure_future(pipeline.tokens(request, sender="me"))
                await _num_running(pipeline, 1)
                with pytest.raises(RequestError, match="already being served"):
                    await pipeline.tokens(request, sender="another sender")
                again = asyncio.ensure_future(pipeline.tokens(request, sender="me"))
                await asyncio.wait({first}, timeout=5.0)
                assert first.cancelled()
            assert await again == _expected(request)

    asyncio.run(run())


def test_a_stream_that_is_read_in_another_pipeline_is_cancelled_and_a_later_attempt_is_not(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            request = _request("mine", max_tokens=20)
            cancel = pipeline.streams.cancel
            with held(pipeline.config):
                reading = asyncio.ensure_future(pipeline.tokens(request, sender="me", attempt=2))
                await _num_running(pipeline, 1)
                cancel(request.request_id, attempt=1, sender="me")
                cancel(request.request_id, attempt=2, sender="another sender")
                cancel(RequestId("unknown"), attempt=2, sender="me")
                await asyncio.sleep(0.05)
                assert not reading.done()
                cancel(request.request_id, attempt=2, sender="me")
                await asyncio.wait({reading}, timeout=5.0)
                assert reading.cancelled()
                await _num_running(pipeline, 0)

    asyncio.run(run())


async def _num_running(pipeline: Pipeline, count: int) -> None:
    async with asyncio.timeout(20.0):
        while (await pipeline.actor.stats()).num_running != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_a_sender_that_was_taken_for_dead_goes_on_from_its_tokens_and_is_left_alone(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            request = _request("mine", max_tokens=120)
            num_sent = 0

            async def source(request: Request) -> AsyncGenerator[StreamItem, None]:
                nonlocal num_sent
                num_sent += 1
                parts = pipeline.streams.stream(request, attempt=num_sent, sender="cut off")
                try:
                    async for part in parts:
                        yield part
                except EesdError as error:
                    yield error

            async def until_ready(lost: EesdError) -> None:
                assert isinstance(lost, PeerLost)

            async def read() -> list[int]:
                parts = resumed(
                    request,
                    source=source,
                    until_ready=until_ready,
                    max_interruptions=1,
                    room_wait_s=5.0,
                )
                return [t async for part in parts for e in part for t in e.tokens]

            with held(pipeline.config):
                reading = asyncio.ensure_future(read())
                await _num_running(pipeline, 1)
                pipeline.streams.cancel_silent(frozenset({"cut off"}))
                async with asyncio.timeout(20.0):
                    while num_sent < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                await _num_running(pipeline, 1)
            while not reading.done():
                pipeline.streams.cancel_silent(frozenset({"cut off"}))  # with every heartbeat
                await asyncio.sleep(0.05)
            assert reading.result() == _expected(request)
            assert num_sent == 2

    asyncio.run(run())


def test_readers_that_leave_do_not_hold_up_those_that_are_tested_after_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with _pipeline(tmp_path) as pipeline:
            good = list(_good(4))
            answers = [asyncio.ensure_future(pipeline.tokens(request)) for request in good]
            bad = asyncio.ensure_future(pipeline.tokens(_poison("bad")))
            while pipeline.num_broken < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            answers[0].cancel()
            answers[2].cancel()
            with pytest.raises(PoisonRequest):
                await bad
            assert await answers[1] == _expected(good[1])
            assert await answers[3] == _expected(good[3])
            assert pipeline.streams.num_live == 0

    asyncio.run(run())
