"""Answers prepared requests with an engine, in one piece or chunk by chunk.

The HTTP API and the batch runner both use it; it depends on neither.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from opentelemetry.trace import Span

from eesd_dist.parameters import has_grammar
from eesd_dist.telemetry.metrics import RequestTimings
from eesd_dist.telemetry.request_spans import request_span, traceparent_of
from eesd_dist.telemetry.tracing import Tracing
from serve_app.openai.answers import Answer, Event, Json
from serve_app.openai.charges import GRAMMAR_TOKENS, Charges, charge
from serve_app.openai.context import RequestContext
from serve_app.openai.errors import RequestExpired
from serve_app.openai.generation import ChoiceTally, Delta, EngineClient, generate, merged
from serve_app.openai.middleware.permits import Quotas
from serve_app.openai.pacing import paced
from serve_app.openai.preparation import Preparation
from serve_app.openai.prepared import Choice, Prepared
from serve_app.openai.request_metrics import request_attributes, total_attributes
from serve_app.openai.schema import ChatFields, CompletionFields
from serve_app.openai.sse import encoded, encoded_in_parts
from serve_app.openai.work_queues import GrammarQueue, TextThreads, size_of

T = TypeVar("T")
RequestObserver = Callable[[RequestTimings], None]

_MAX_CHOICES_AT_ONCE = 32
_INLINE_SIZE = 4096
"""Largest size of an answer, as `Answer.size` counts it, that is encoded inline: some
milliseconds."""
_SLOW = 2**31
"""Size of work that is never done on the event loop."""
_WINDOW_S = 60.0
_MIN_S = 1.0
_MAX_S = 60.0
_OPERATIONS = {"chat": "chat", "completion": "text_completion"}


class TextService:
    """A served model."""

    def __init__(
        self,
        engine: EngineClient,
        preparation: Preparation,
        *,
        tracing: Tracing | None = None,
        observe_request: RequestObserver | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """`observe_request` is called for every choice that ended, in whatever way."""
        self._engine = engine
        self._preparation = preparation
        self._limits = preparation.limits
        self._settings = preparation.settings
        self._tracing = tracing or Tracing()
        self._observe_request = observe_request
        self.charges = Charges(quotas)
        self._throughput = Throughput()
        self.threads = TextThreads()
        self._grammar_threads = TextThreads()
        """Grammars do not keep long texts waiting."""
        self._grammars = GrammarQueue()

    async def prepared(
        self, fields: CompletionFields | ChatFields, context: RequestContext
    ) -> Prepared:
        def prepare() -> Prepared:
            if isinstance(fields, ChatFields):
                return self._preparation.chat(fields, context)
            return self._preparation.completion(fields, context)

        if self.has_to_compile(fields):
            await self.charges.work(context.permit, GRAMMAR_TOKENS)
            await self._compile_grammar(fields, caller=context.caller)
        size = size_of(fields)
        tokenising = self.threads.run(prepare, size=size)
        prepared = await self.charges.tokenised(tokenising, context.permit, size=size)
        await self.charges.reserve(prepared)
        return prepared

    def has_to_compile(self, fields: CompletionFields | ChatFields) -> bool:
        """Returns whether a request has a grammar, which may have to be compiled."""
        return has_grammar(fields) or (isinstance(fields, ChatFields) and fields.must_call)

    async def _compile_grammar(self, fields: CompletionFields | ChatFields, *, caller: str) -> None:
        """Compiles the grammar of a request, unless it was compiled before."""
        constraint = await self._grammar_threads.run(
            partial(self._preparation.new_grammar, fields), size=_SLOW
        )
        if constraint is not None:
            compile_ = partial(self._preparation.compile_grammar, constraint)
            await self._grammars.run(compile_, caller=caller)

    def retry_after_s(self) -> float:
        """Returns how long a client should wait that is refused now."""
        return self._throughput.retry_after_s()

    async def whole(self, prepared: Prepared) -> Json:
        return (await self._complete(prepared)).whole()

    async def body(self, prepared: Prepared) -> bytes:
        """Returns the whole answer as JSON; a large one is written in a thread."""
        answer = await self._complete(prepared)
        if answer.size <= _INLINE_SIZE:
            return encoded(answer.whole())
        return await self.threads.finish(lambda: encoded_in_parts(answer.whole()))

    async def _complete(self, prepared: Prepared) -> Answer:
        tallies = _new_tallies(prepared)
        answer = Answer(prepared, codec=self._preparation.codec, tallies=tallies)
        async with aclosing(self._deltas(prepared, tallies)) as deltas:
            async for delta in deltas:
                answer.add(delta)
        return answer

    async def events(self, prepared: Prepared) -> AsyncGenerator[Event, None]:
        """Yields events; the first comes with the first tokens, so that a refusal precedes it."""
        tallies = _new_tallies(prepared)
        answer = Answer(prepared, codec=self._preparation.codec, tallies=tallies)
        openings = answer.opening_events()
        async with aclosing(self._deltas(prepared, tallies)) as deltas:
            async for delta in deltas:
                while openings:
                    yield openings.pop(0)
                answer.add(delta)
                event = answer.event(delta)
                if event is not None:
                    yield event
        for opening in openings:  # of a stream of which everything was shown
            yield opening
        if prepared.options.include_usage:
            yield answer.usage_event()

    async def _deltas(
        self, prepared: Prepared, tallies: Sequence[ChoiceTally]
    ) -> AsyncGenerator[Delta, None]:
        self._throughput.started(len(tallies))
        error: BaseException | None = None
        try:
            with self._span(prepared) as span:
                sources = self._sources(prepared, traceparent_of(span))
                stream = merged(sources, at_once=self._max_choices_at_once)
                try:
                    async with aclosing(self._in_time(prepared, stream)) as deltas:
                        async for delta in deltas:
                            tallies[delta.index].add(delta)
                            yield delta
                finally:
                    if span.is_recording():
                        span.set_attributes(total_attributes(prepared, tallies))
        except BaseException as raised:
            error = raised
            raise
        finally:
            # Those without a token say nothing about how fast others end.
            num_served = sum(tally.num_tokens > 0 for tally in tallies)
            self._throughput.ended(num_served, num_empty=len(tallies) - num_served)
            charge(prepared, tallies, error=error)
            self._report(prepared, tallies)

    async def _in_time(
        self, prepared: Prepared, deltas: AsyncGenerator[Delta, None]
    ) -> AsyncGenerator[Delta, None]:
        """Raises RequestExpired at the end of the request's time."""
        async with aclosing(deltas):
            while True:
                try:
                    async with asyncio.timeout(self._left_s(prepared)):
                        delta = await anext(deltas)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    assert self._limits is not None, "nothing else has a deadline here"
                    raise RequestExpired(limit_s=self._limits.request_ttl_s) from error
                yield delta

    @property
    def _max_choices_at_once(self) -> int:
        return _MAX_CHOICES_AT_ONCE if self._limits is None else self._limits.max_choices_at_once

    def _left_s(self, prepared: Prepared) -> float | None:
        if self._limits is None:
            return None
        return prepared.arrived_s + self._limits.request_ttl_s - time.monotonic()

    def _sources(
        self, prepared: Prepared, traceparent: str | None
    ) -> list[AsyncGenerator[Delta, None]]:
        """Returns what generates each choice that has to run."""
        running = [choice for choice in prepared.choices if prepared.has_to_run(choice)]
        return [
            self._source(
                choice, prepared, traceparent, is_continued=number >= self._max_choices_at_once
            )
            for number, choice in enumerate(running)
        ]

    def _source(
        self, choice: Choice, prepared: Prepared, traceparent: str | None, *, is_continued: bool
    ) -> AsyncGenerator[Delta, None]:
        traced = replace(choice.request, traceparent=traceparent, is_continued=is_continued)
        pace = self._settings.pace if prepared.options.stream else None
        deltas = generate(
            self._engine,
            replace(choice, request=traced),
            codec=self._preparation.codec,
            options=prepared.text,
            by_token=pace is not None,
        )
        if pace is None:
            return deltas
        return paced(deltas, pace, num_shown=prepared.shown[choice.index].num_tokens)

    def _span(self, prepared: Prepared) -> AbstractContextManager[Span]:
        request = prepared.choices[0].request
        return request_span(
            self._tracing.tracer,
            operation=_OPERATIONS[prepared.kind],
            model=prepared.model,
            traceparent=request.traceparent,
            sampling=request.sampling,
            stream=prepared.options.stream,
            attributes=request_attributes(prepared, controller=self._settings.controller),
        )

    def _report(self, prepared: Prepared, tallies: Sequence[ChoiceTally]) -> None:
        if self._observe_request is None:
            return
        end_s = time.monotonic()
        for choice, tally in zip(prepared.choices, tallies, strict=True):
            if not prepared.has_to_run(choice):
                continue
            self._observe_request(
                RequestTimings(
                    num_prompt_tokens=len(choice.request.prompt),
                    finish_reason=tally.finish_reason,
                    queue_s=tally.queue_s or 0.0,
                    e2e_s=end_s - prepared.arrived_s,
                    time_to_first_token_s=(
                        None if tally.first_s is None else tally.first_s - prepared.arrived_s
                    ),
                    inter_token_s=tuple(tally.inter_token_s),
                )
            )


def _new_tallies(prepared: Prepared) -> list[ChoiceTally]:
    return [ChoiceTally() for _ in prepared.choices]


class Throughput:
    """Counts the choices of one ingress that are live, and those that ended within a minute."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._ended_s: deque[float] = deque()
        self.num_live = 0

    def started(self, num_choices: int) -> None:
        self.num_live += num_choices

    def ended(self, num_choices: int, *, num_empty: int = 0) -> None:
        """Counts choices that are not live any more; `num_empty` of them have got no token."""
        self.num_live -= num_choices + num_empty
        self._ended_s.extend([self._clock()] * num_choices)
        self._forget()

    def retry_after_s(self) -> float:
        """Returns the time in which the live choices end at the present rate, within bounds; while
        none has ended, as long as that has been so."""
        self._forget()
        window_s = min(_WINDOW_S, self._clock() - self._began_s)
        num_ended = len(self._ended_s)
        expected_s = self.num_live * window_s / num_ended if num_ended else window_s
        return min(max(expected_s, _MIN_S), _MAX_S)

    def _forget(self) -> None:
        oldest_s = self._clock() - _WINDOW_S
        while self._ended_s and self._ended_s[0] < oldest_s:
            self._ended_s.popleft()
