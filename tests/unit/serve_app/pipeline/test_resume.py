"""A stream over sources that break off: nothing lost, nothing twice, and an end in any case."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from serve_app.pipeline.resume import Resubmit, resumed

from eesd_dist.errors import EesdError, EngineError, Migrated, PeerLost, QueueFull, RequestError
from eesd_dist.types import Emission, FinishReason, Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.messages import StreamItem

TEXT = tuple(TokenId(t) for t in range(100, 110))
LOST = PeerLost(peer="verify rank 1", operation="round 3", reason="its process has died")
REQUEST = Request(
    request_id=RequestId("r"), prompt=(TokenId(1),), sampling=SamplingParams(max_tokens=10)
)


class Source:
    """Gives the text two tokens at a time; its n-th call breaks off after breaks[n] tokens."""

    def __init__(self, breaks: Sequence[int], *, error: EesdError = LOST) -> None:
        self._breaks = list(breaks)
        self._error = error
        self.calls: list[int] = []
        """How many tokens each call was told to begin behind."""
        self.num_open = 0

    async def __call__(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        at = len(request.generated)
        assert request.generated == TEXT[:at]
        self.calls.append(at)
        ends_at = self._breaks.pop(0) if self._breaks else len(TEXT)
        self.num_open += 1
        try:
            while at < ends_at:
                tokens = TEXT[at : min(at + 2, ends_at)]
                at += len(tokens)
                yield (_emission(tokens, is_last=at == len(TEXT)),)
            if at < len(TEXT):
                yield self._error
        finally:
            self.num_open -= 1


def _emission(tokens: tuple[TokenId, ...], *, is_last: bool) -> Emission:
    return Emission(
        request_id=REQUEST.request_id,
        tokens=tokens,
        num_accepted=0,
        num_cached_prompt_tokens=7,
        finish_reason=FinishReason.LENGTH if is_last else None,
    )


async def _at_once(_: EesdError) -> None:
    return


def _run(
    source: Source,
    *,
    max_interruptions: int = 4,
    room_wait_s: float = 10.0,
    max_migrations: int = 0,
) -> list[Emission]:
    async def collect() -> list[Emission]:
        parts = resumed(
            REQUEST,
            source=source,
            until_ready=_at_once,
            max_interruptions=max_interruptions,
            room_wait_s=room_wait_s,
            max_migrations=max_migrations,
            breath_s=0.0,
        )
        return [emission async for part in parts for emission in part]

    return asyncio.run(collect())


@pytest.mark.parametrize("breaks", [[], [0], [4], [2, 2, 5], [0, 0, 9, 9]])
def test_the_text_is_complete_wherever_it_was_broken_off(breaks: list[int]) -> None:
    source = Source(breaks)
    emissions = _run(source)
    assert tuple(token for e in emissions for token in e.tokens) == TEXT
    assert source.calls == [0, *breaks]
    assert source.num_open == 0


def test_only_the_first_submission_says_what_was_cached_of_the_prompt() -> None:
    cached = [e.num_cached_prompt_tokens for e in _run(Source([4]))]
    assert cached == [7, 7, 0, 0, 0]


def test_a_request_that_is_interrupted_again_and_again_without_a_token_is_given_up() -> None:
    with pytest.raises(EngineError, match="3 interruptions without a token: lost verify rank 1"):
        _run(Source([2, 4, 4, 4, 4]), max_interruptions=2)


def test_interruptions_with_progress_between_them_are_not_bounded() -> None:
    source = Source([2, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 8, 9])
    assert tuple(token for e in _run(source, max_interruptions=2) for token in e.tokens) == TEXT


@pytest.mark.parametrize(
    ("error", "crashes"),
    [(LOST, [0, 0, 0, 0, 0]), (Migrated(by="p", to=None, reason="", crashes=2), [0, 2, 2, 2, 2])],
)
def test_crashes_are_those_that_an_engine_gave_and_a_token_clears_them(
    error: EesdError, crashes: list[int]
) -> None:
    seen: list[int] = []

    class Watched(Source):
        async def __call__(self, request: Request) -> AsyncGenerator[StreamItem, None]:
            seen.append(request.crashes)
            async for item in super().__call__(request):
                yield item

    emissions = _run(Watched([2, 2, 2, 4], error=error), max_migrations=1)
    assert seen == crashes
    assert tuple(token for e in emissions for token in e.tokens) == TEXT


def test_a_source_that_lets_a_stream_go_for_a_while_gets_it_again_and_nothing_is_counted() -> None:
    source = Source([2] * 50, error=Resubmit())
    emissions = _run(source, max_interruptions=0)
    assert tuple(token for e in emissions for token in e.tokens) == TEXT
    assert len(source.calls) == 51


def test_a_refusal_of_the_request_itself_is_not_tried_again() -> None:
    source = Source([0], error=RequestError("no", param="prompt"))
    with pytest.raises(RequestError, match="no"):
        _run(source)
    assert source.calls == [0]


def test_a_full_queue_refuses_a_new_request_and_never_one_that_has_begun() -> None:
    full = QueueFull(num_waiting=1, limit=1)
    with pytest.raises(QueueFull):
        _run(Source([0], error=full))
    assert len(_run(Source([4], error=full))) == 5


def test_a_stream_that_has_begun_waits_for_room_by_the_clock_and_not_by_the_count() -> None:
    full = QueueFull(num_waiting=1, limit=1)
    source = Source([4] * 20, error=full)
    assert tuple(token for e in _run(source, max_interruptions=1) for token in e.tokens) == TEXT
    assert len(source.calls) == 21
    with pytest.raises(EngineError, match=r"no room to continue within 0\.05 s: 1 requests are"):
        _run(Source([4] * 1_000_000, error=full), room_wait_s=0.05)


def test_a_bug_in_the_engine_ends_the_stream() -> None:
    with pytest.raises(EngineError, match="broke"):
        _run(Source([4], error=EngineError("the loop broke")))


def test_a_source_that_just_ends_is_taken_for_lost() -> None:
    class Silent(Source):
        async def __call__(self, request: Request) -> AsyncGenerator[StreamItem, None]:
            self.calls.append(len(request.generated))
            if len(self.calls) == 1:
                return
            async for item in super().__call__(request):
                yield item

    assert len(_run(Silent([]))) == 5


def test_a_reader_that_leaves_closes_the_source() -> None:
    source = Source([])

    async def read_one() -> None:
        parts = resumed(
            REQUEST, source=source, until_ready=_at_once, max_interruptions=1, room_wait_s=1.0
        )
        await anext(parts)
        assert source.num_open == 1
        await parts.aclose()

    asyncio.run(read_one())
    assert source.num_open == 0


def test_waiting_for_a_ready_pipeline_may_end_the_stream() -> None:
    async def never(lost: EesdError) -> None:
        raise EngineError(f"not ready again: {lost}")

    async def read() -> None:
        source = Source([4])
        async for _ in resumed(
            REQUEST,
            source=source,
            until_ready=never,
            max_interruptions=4,
            room_wait_s=1.0,
            breath_s=0.0,
        ):
            pass

    with pytest.raises(EngineError, match="not ready again: lost verify rank 1"):
        asyncio.run(read())


MIGRATED = Migrated(by="one", to="two", reason="it is drained")


@pytest.mark.parametrize("breaks", [[0], [4], [0, 0, 0], [2, 2, 2, 5, 5], [2, 4, 6, 8]])
def test_a_stream_that_is_migrated_goes_on_at_once_and_has_suffered_nothing(
    breaks: list[int],
) -> None:
    source = Source(breaks, error=MIGRATED)
    emissions = _run(source, max_interruptions=0, max_migrations=3)
    assert tuple(t for e in emissions for t in e.tokens) == TEXT
    assert source.calls == [0, *breaks]


def test_a_caller_that_cannot_follow_a_migrated_stream_gets_the_error() -> None:
    with pytest.raises(Migrated, match="migrated its stream to two"):
        _run(Source([4], error=MIGRATED))


def test_a_stream_handed_to_and_fro_is_ended_by_the_clock_and_not_by_the_count() -> None:
    source = Source([4] * 100, error=MIGRATED)
    emissions = _run(source, max_interruptions=1, max_migrations=3)
    assert tuple(t for e in emissions for t in e.tokens) == TEXT
    assert len(source.calls) == 101
    with pytest.raises(EngineError, match=r"to and fro for 0\.05 s .*migrated its stream"):
        _run(Source([4] * 1_000_000, error=MIGRATED), max_migrations=3, room_wait_s=0.05)


def test_a_stream_that_has_begun_nowhere_waits_for_room_where_it_was_handed_to() -> None:
    class ToAFullOne(Source):
        async def __call__(self, request: Request) -> AsyncGenerator[StreamItem, None]:
            if 0 < len(self.calls) < 4:
                self._breaks, self._error = [0], QueueFull(num_waiting=4, limit=4)
            async with aclosing(super().__call__(request)) as items:
                async for item in items:
                    yield item

    source = ToAFullOne([0], error=MIGRATED)
    emissions = _run(source, max_migrations=3)
    assert tuple(t for e in emissions for t in e.tokens) == TEXT
    assert len(source.calls) == 5
