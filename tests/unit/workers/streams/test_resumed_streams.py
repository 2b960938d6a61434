"""A drafting actor gives a client that comes back what it has made, and goes on after that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, PeerLost, QueueFull, RequestError, ResumedElsewhere
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers import drafting_actor
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import StreamItem
from tests.support.in_process import epoch, joined_actor
from tests.support.toy_stages import held, toy_token


class Reader:
    """One client of the actor, with one stream at a time."""

    def __init__(self, actor: DraftActor, name: str) -> None:
        self._actor = actor
        self._name = name
        self._last = ("", 0)

    async def begin(self, request: Request) -> None:
        await self._actor.submit(request, self._name)

    async def items(self, request: Request) -> AsyncIterator[StreamItem]:
        while True:
            batch = await self._actor.take(self._name, self._last)
            self._last = (batch.outbox, batch.number)
            for request_id, submission, item in batch.items:
                if (request_id, submission) == (request.request_id, request.submission):
                    yield item

    async def tokens(self, request: Request, *, min_tokens: int | None = None) -> list[int]:
        """Returns tokens, up to the last one; raises the error that ends the stream."""
        tokens: list[int] = []
        async for item in self.items(request):
            if isinstance(item, EesdError):
                raise item
            tokens += [token for emission in item for token in emission.tokens]
            if item[-1].finish_reason is not None:
                return tokens
            if min_tokens is not None and len(tokens) >= min_tokens:
                return tokens
        raise AssertionError("unreachable")


def _request(*, max_tokens: int = 30, top_logprobs: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=3, top_logprobs=top_logprobs)
    return Request(
        request_id=RequestId("r"),
        prompt=(TokenId(1),),
        sampling=sampling,
        submission=5,
        resume_window_s=60.0,
    )


def _resumed(request: Request, *, submission: int = 6, resumption: int = 100) -> Request:
    return replace(request, submission=submission, resumption=resumption)


def _text(request: Request) -> list[int]:
    return [toy_token(request, 1 + i) for i in range(request.sampling.max_tokens)]


@asynccontextmanager
async def _actor(folder: Path, **scheduler: int) -> AsyncIterator[DraftActor]:
    tree = {"model": {"path": str(folder)}, "scheduler": scheduler}
    actor = await joined_actor(EngineConfig.model_validate(tree))
    async with asyncio.timeout(30.0):
        yield actor
    assert await actor.leave()


@pytest.mark.parametrize("submission", [6, 4], ids=["a later ingress", "an earlier ingress"])
def test_a_live_stream_is_taken_over_and_its_old_reader_gets_one_error(
    tmp_path: Path, submission: int
) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            old, new = Reader(actor, "old"), Reader(actor, "new")
            request = _request()
            retry = _resumed(request, submission=submission)
            with held(EngineConfig.model_validate({"model": {"path": str(tmp_path)}})):
                await old.begin(request)
                prefix = await old.tokens(request, min_tokens=10)
                await new.begin(retry)
                with pytest.raises(ResumedElsewhere):
                    await old.tokens(request)
                assert await new.tokens(retry, min_tokens=10) == prefix
                assert (await actor.stats()).num_running == 1
            assert prefix + await new.tokens(retry) == _text(request)
            assert await actor.live() == ()

    asyncio.run(run())


def test_a_stream_whose_client_has_left_frees_its_slot_and_goes_on_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            reader, request = Reader(actor, "c"), _request()
            await reader.begin(request)
            prefix = await reader.tokens(request, min_tokens=8)
            await actor.cancel(request.request_id, request.submission)
            assert (await actor.stats()).num_running == 0
            num_tokens = await actor.num_kept(request.request_id)
            assert num_tokens is not None
            assert num_tokens >= len(prefix)
            retry = _resumed(request)
            await reader.begin(retry)
            text = await reader.tokens(retry, min_tokens=num_tokens)
            assert text[: len(prefix)] == prefix
            assert text + await reader.tokens(retry) == _text(request)

    asyncio.run(run())


def test_a_finished_stream_is_read_again_without_the_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            reader, request = Reader(actor, "c"), _request()
            await reader.begin(request)
            assert await reader.tokens(request) == _text(request)
            num_rounds = (await actor.stats()).num_rounds
            for i in (6, 7):
                retry = _resumed(request, submission=i, resumption=i)
                await reader.begin(retry)
                assert await reader.tokens(retry) == _text(request)
            assert (await actor.stats()).num_rounds == num_rounds
            assert await actor.live() == ()

    asyncio.run(run())


def test_a_stream_that_went_unread_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_actor, "_LOOK_S", 0.05)
    monkeypatch.setattr(drafting_actor, "_UNREAD_S", 0.2)

    async def run() -> None:
        async with _actor(tmp_path) as actor:
            request = _request(max_tokens=200)
            await actor.submit(request, "a client that has died")
            await asyncio.sleep(0.8)
            assert await actor.live() == ()
            num_tokens = await actor.num_kept(request.request_id)
            assert num_tokens
            assert num_tokens < 200
            retry = _resumed(request)
            reader = Reader(actor, "c")
            await reader.begin(retry)
            assert await reader.tokens(retry) == _text(request)

    asyncio.run(run())


@pytest.mark.parametrize(
    "changes", [{"resume_window_s": 0.0}, {"resume_window_s": 0.05}], ids=["off", "over"]
)
def test_a_stream_that_is_not_kept_is_computed_again(
    tmp_path: Path, changes: dict[str, float]
) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            reader = Reader(actor, "c")
            request = replace(_request(), **changes)  # type: ignore[arg-type]
            await reader.begin(request)
            await reader.tokens(request, min_tokens=8)
            await actor.cancel(request.request_id, request.submission)
            await asyncio.sleep(0.1)
            assert await actor.num_kept(request.request_id) is None
            retry = _resumed(request)
            await reader.begin(retry)
            assert await reader.tokens(retry) == _text(request)

    asyncio.run(run())


def test_a_stream_goes_on_being_kept_in_the_next_epoch(tmp_path: Path) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            reader, request = Reader(actor, "c"), _request(max_tokens=60)
            await reader.begin(request)
            prefix = await reader.tokens(request, min_tokens=8)
            await actor.leave(PeerLost(peer="verify rank 0", operation="receive", reason="dead"))
            await actor.join(epoch(2))
            attempt = replace(request, submission=6, generated=tuple(map(TokenId, prefix)))
            await reader.begin(attempt)
            await reader.tokens(attempt, min_tokens=8)
            retry = _resumed(request, submission=7)
            await reader.begin(retry)
            assert await reader.tokens(retry) == _text(request)

    asyncio.run(run())


def test_an_attempt_of_a_connection_that_was_replaced_does_not_take_the_stream_back(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            old, new, request = Reader(actor, "old"), Reader(actor, "new"), _request(max_tokens=80)
            retry = _resumed(request)
            await new.begin(retry)
            stale_attempt = replace(request, submission=9)
            await old.begin(stale_attempt)
            with pytest.raises(ResumedElsewhere):
                await old.tokens(stale_attempt)
            assert await new.tokens(retry) == _text(request)

    asyncio.run(run())


def test_an_id_that_is_served_is_refused_without_a_resumption(tmp_path: Path) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            old, other, request = Reader(actor, "old"), Reader(actor, "other"), _request()
            await old.begin(request)
            await other.begin(replace(request, submission=4))
            with pytest.raises(RequestError, match="already being served"):
                await other.tokens(replace(request, submission=4))
            assert await old.tokens(request) == _text(request)

    asyncio.run(run())


def test_a_resumption_that_is_refused_leaves_the_stream_to_its_reader(tmp_path: Path) -> None:
    async def run() -> None:
        async with _actor(tmp_path) as actor:
            old, new, request = Reader(actor, "old"), Reader(actor, "new"), _request()
            await old.begin(request)
            actor._streams._max_waiting = 0
            await new.begin(_resumed(request))
            with pytest.raises(QueueFull):
                await new.tokens(_resumed(request))
            assert await old.tokens(request) == _text(request)

    asyncio.run(run())
