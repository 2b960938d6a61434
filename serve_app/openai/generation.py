"""Runs the choices of one request and turns their tokens into text.

Decides where a choice's text ends and counts what it took. A generation that the engine has not
ended itself is always aborted: when the text ended at a stop string, when the client left, when
another choice failed. Knows no JSON, and of engines only `EngineClient`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from msgspec import structs

from eesd_dist.errors import EngineError, RequestError
from eesd_dist.text import TextAssembler, TextCodec, TextDelta
from eesd_dist.types import Emission, FinishReason, Request, RequestId
from serve_app.openai.prepared import Choice, TextOptions

T = TypeVar("T")

_NOTHING = TextDelta(
    text="", pieces=(), tokens=(), logprobs=(), finish_reason="length", stop_reason=None
)


class EngineClient(Protocol):
    """An engine in this process, or pipelines in other processes; the tests use a toy."""

    def stream(self, request: Request) -> AsyncIterator[tuple[Emission, ...]]:
        """Yields the request's emissions, one or more at a time; the last one has a finish reason.

        Raises an EesdError: before the first emission when the request is refused, later when the
        engine failed and the stream cannot continue.
        """
        ...

    async def abort(self, request_id: RequestId) -> None:
        """Aborts a request and frees what it holds. An unknown id is no error."""
        ...


class EndedByEngine(RequestError):
    """The engine has ended a request that it had begun, for a reason that lies in the request."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The addition of one or more rounds of one choice to the answer."""

    index: int
    text_delta: TextDelta
    rounds: tuple[Emission, ...]
    """The rounds of which it has the first token."""
    at_s: float
    """Earliest time at which it may be sent, on the monotonic clock."""
    text_s: float = 0.0
    """Time that it took to make text of its tokens."""
    num_buffered: int = 0
    """Tokens that were made and are sent later."""


class ChoiceTally:
    """Counts and times of one choice so far."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_buffered = 0
        """Tokens that were made and not sent yet."""
        self.num_cached = 0
        self.num_interruptions = 0
        self.text_s = 0.0
        self.queue_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.inter_token_s: list[float] = []
        """Seconds per token since the emission before, for every emission after the first."""
        self.rounds: list[Emission] = []
        """Emissions without log-probabilities, which the answer has."""
        self.finish_reason = FinishReason.ABORT
        """ABORT until the text has ended."""

    def add(self, delta: Delta) -> None:
        for emission in delta.rounds:
            self._add_round(emission)
        self.text_s += delta.text_s
        self.num_buffered = delta.num_buffered
        if delta.text_delta.finish_reason is not None:
            self.finish_reason = FinishReason(delta.text_delta.finish_reason)
        if delta.text_delta.tokens:
            self._take_time(delta)

    def _add_round(self, emission: Emission) -> None:
        if emission.logprobs or emission.prompt_logprobs:
            emission = structs.replace(emission, logprobs=(), prompt_logprobs=())
        self.rounds.append(emission)
        self.num_interruptions = max(self.num_interruptions, emission.num_interruptions)
        self.num_cached = max(self.num_cached, emission.num_cached_prompt_tokens)
        if emission.queue_s is not None:
            self.queue_s = emission.queue_s

    def _take_time(self, delta: Delta) -> None:
        self.num_tokens += len(delta.text_delta.tokens)
        if self.last_s is None:
            self.first_s = delta.at_s
        else:
            self.inter_token_s.append((delta.at_s - self.last_s) / len(delta.text_delta.tokens))
        self.last_s = delta.at_s


async def generate(
    engine: EngineClient,
    choice: Choice,
    *,
    codec: TextCodec,
    options: TextOptions,
    by_token: bool = False,
) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of one choice, until its text ends: one for the rounds that arrive
    together, or one for each token."""
    text = TextAssembler(
        codec,
        choice.request.sampling,
        stops=options.stops,
        include_stop_in_output=options.include_stop_in_output,
        skip_special_tokens=options.skip_special_tokens,
        shown_special_tokens=options.shown_special_tokens,
    )
    batches = engine.stream(choice.request)
    ended_itself = False

    def deltas_of(emissions: Sequence[Emission]) -> Iterator[Delta]:
        for emission in emissions:
            rounds: tuple[Emission, ...] = (emission,)
            for fragment in _tokens_of(emission) if by_token else rounds:
                arrived_s = time.monotonic()
                text_delta = text.take(fragment)
                ready_s = time.monotonic()
                if options.drops_tokens:
                    text_delta = _NOTHING
                yield Delta(choice.index, text_delta, rounds, ready_s, text_s=ready_s - arrived_s)
                if text_delta.finish_reason is not None:
                    return
                rounds = ()

    try:
        async for emissions in batches:
            error = _error_of(emissions[-1])
            ended_itself = error is None and emissions[-1].finish_reason is not None
            deltas = list(deltas_of(emissions if error is None else emissions[:-1]))
            if deltas:
                for delta in deltas if by_token else (merged_delta(deltas),):
                    yield delta
                if deltas[-1].text_delta.finish_reason is not None:
                    return
            if error is not None:
                raise error
        raise EngineError("the engine ended a stream without a finish reason")
    finally:
        await _release(engine, choice, batches, abort=not ended_itself)


def merged_delta(deltas: Sequence[Delta]) -> Delta:
    """Returns consecutive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    text_deltas = [delta.text_delta for delta in deltas]
    return Delta(
        index=deltas[0].index,
        text_delta=TextDelta(
            text="".join(delta.text for delta in text_deltas),
            pieces=tuple(token_text for delta in text_deltas for token_text in delta.pieces),
            tokens=tuple(token for delta in text_deltas for token in delta.tokens),
            logprobs=tuple(entry for delta in text_deltas for entry in delta.logprobs),
            finish_reason=text_deltas[-1].finish_reason,
            stop_reason=text_deltas[-1].stop_reason,
        ),
        rounds=tuple(emission for delta in deltas for emission in delta.rounds),
        at_s=deltas[-1].at_s,
        text_s=sum(delta.text_s for delta in deltas),
    )


def _tokens_of(emission: Emission) -> Iterator[Emission]:
    """Yields the tokens of an emission one by one, of which the last one ends what it ends."""
    last = len(emission.tokens) - 1
    if last <= 0:
        yield emission
        return
    for at in range(last + 1):
        yield structs.replace(
            emission,
            tokens=emission.tokens[at : at + 1],
            logprobs=emission.logprobs[at : at + 1],
            finish_reason=emission.finish_reason if at == last else None,
        )


async def merged(
    sources: Sequence[AsyncGenerator[T, None]], *, at_once: int = 32
) -> AsyncGenerator[T, None]:
    """Yields the items of all sources in order of arrival; the first error ends all sources.

    At most `at_once` sources run at a time: all choices of one request would fill any queue.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for only in source:
                yield only
        return
    items: asyncio.Queue[T | _Ended] = asyncio.Queue()
    turns = asyncio.Semaphore(at_once)
    pumps = [asyncio.create_task(_pump(source, items, turns)) for source in sources]
    num_running = len(pumps)
    try:
        while num_running:
            item = await items.get()
            if not isinstance(item, _Ended):
                yield item
                continue
            num_running -= 1
            if item.error is not None:
                raise item.error
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """Marks the end of one source."""

    error: Exception | None = None


async def _pump(
    source: AsyncGenerator[T, None], items: asyncio.Queue[T | _Ended], turns: asyncio.Semaphore
) -> None:
    try:
        async with turns, aclosing(source):
            async for item in source:
                items.put_nowait(item)
    except Exception as error:  # raised again by `merged`
        items.put_nowait(_Ended(error=error))
    else:
        items.put_nowait(_Ended())


def _error_of(emission: Emission) -> Exception | None:
    if emission.error is not None:
        return EndedByEngine(emission.error)
    if emission.finish_reason is FinishReason.ABORT:
        return EngineError("the service ended this request before it was finished")
    return None


async def _release(
    engine: EngineClient,
    choice: Choice,
    batches: AsyncIterator[tuple[Emission, ...]],
    *,
    abort: bool,
) -> None:
    try:
        if isinstance(batches, AsyncGenerator):
            await batches.aclose()
    finally:
        if abort:
            await engine.abort(choice.request.request_id)
