"""Events at fixed times with a fixed number of tokens: the same text, whatever is accepted when."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import httpx
import pytest

from eesd_dist.errors import EngineError
from eesd_dist.text import TextDelta
from eesd_dist.types import Emission, RequestId, TokenId
from serve_app.config import StreamsConfig
from serve_app.ingress.deployment import _pace_of
from serve_app.openai.context import RequestContext
from serve_app.openai.generation import Delta
from serve_app.openai.keys import ANYONE, Permit
from serve_app.openai.pacing import Pace, paced
from serve_app.openai.schema import CompletionFields
from serve_app.openai.text_service import TextService
from tests.support.event_stream import WITH_IDS, SentEvent, folded, parsed
from tests.support.live_server import serving
from tests.support.running import until
from tests.support.toy_api import toy_api, toy_preparation
from tests.support.toy_engine import ToyEngine
from tests.unit.serve_app.openai.conftest import MAX_MODEL_LEN, Api
from tests.unit.serve_app.openai.test_resuming import CASES, COMPLETION

T = TypeVar("T")
Sent = list[tuple[float, int]]
"""Time and number of tokens of each event."""
PACE = Pace(interval_s=0.5, tokens_per_event=4)


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop in which no time passes but that which is slept."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def advance(timeout: float | None) -> Any:
            self._now_s += timeout or 0.0
            return select(0)

        selector.select = advance

    def time(self) -> float:
        return self._now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work)


async def _made(
    rounds: Sequence[tuple[float, int]], *, error: Exception | None = None
) -> AsyncGenerator[Delta, None]:
    """Yields a delta for each token of rounds, which take so many seconds and have so many
    tokens."""
    numbers = itertools.count()
    for at, (seconds, num_tokens) in enumerate(rounds):
        await asyncio.sleep(seconds)
        emission = Emission(
            request_id=RequestId("r"),
            tokens=(TokenId(0),) * num_tokens,
            num_accepted=num_tokens - 1,
            num_drafted=num_tokens,
        )
        for index in range(num_tokens):
            is_last = at == len(rounds) - 1 and index == num_tokens - 1 and error is None
            token = next(numbers)
            text_delta = TextDelta(
                text=f"{token} ",
                pieces=(f"{token} ",),
                tokens=(TokenId(token),),
                logprobs=(),
                finish_reason="length" if is_last else None,
                stop_reason=None,
            )
            yield Delta(0, text_delta, (emission,) if index == 0 else (), 0.0)
    if error is not None:
        raise error


async def _sent(
    deltas: AsyncGenerator[Delta, None], *, num_shown: int = 0
) -> tuple[Sent, list[Delta]]:
    loop = asyncio.get_running_loop()
    times: Sent = []
    collected: list[Delta] = []
    async with aclosing(paced(deltas, PACE, num_shown=num_shown)) as events:
        async for delta in events:
            times.append((loop.time(), len(delta.text_delta.tokens)))
            collected.append(delta)
    return times, collected


async def _collect(deltas: AsyncGenerator[Delta, None], collected: list[Delta]) -> None:
    async for delta in deltas:
        collected.append(delta)


def _is_whole(deltas: Sequence[Delta], rounds: Sequence[tuple[float, int]]) -> bool:
    num_tokens = sum(number for _, number in rounds)
    return (
        [token for delta in deltas for token in delta.text_delta.tokens] == list(range(num_tokens))
        and "".join(delta.text_delta.text for delta in deltas)
        == "".join(f"{token} " for token in range(num_tokens))
        and [len(e.tokens) for delta in deltas for e in delta.rounds]
        == [number for _, number in rounds]
    )


@pytest.mark.parametrize("seed", range(20))
def test_sizes_and_times_do_not_depend_on_what_is_accepted_while_the_engine_is_ahead(
    seed: int,
) -> None:
    rng = Random(seed)
    num_tokens = rng.randrange(30, 60)
    runs = []
    for longest in (1, 3, 9):
        rounds: list[tuple[float, int]] = [(1.0, 1)]
        while (left := num_tokens - sum(number for _, number in rounds)) > 0:
            number = min(left, rng.randint(1, longest))
            rounds.append((rng.uniform(0.01, 0.05) * number, number))
        times, deltas = run(_sent(_made(rounds)))
        assert _is_whole(deltas, rounds)
        runs.append(times)
    assert runs[0] == runs[1] == runs[2]
    first = runs[0]
    assert [number for _, number in first[:-1]] == [4] * (len(first) - 1)
    assert [at_s for at_s, _ in first] == pytest.approx(
        [1.0 + 0.5 * tick for tick in range(1, len(first) + 1)]
    )


def test_an_engine_that_is_behind_leaves_ticks_out_and_no_event_is_smaller() -> None:
    rounds = [(1.0, 1), (1.3, 2), (0.1, 6), (2.0, 1)]
    times, deltas = run(_sent(_made(rounds)))
    assert _is_whole(deltas, rounds)
    assert [(round(at_s, 6), number) for at_s, number in times] == [(2.5, 4), (3.0, 4), (4.5, 2)]


def test_a_reader_that_was_slow_gets_no_burst_of_events() -> None:
    async def read() -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        async with aclosing(paced(_made([(1.0, 40)]), PACE)) as events:
            async for _ in events:
                times.append(loop.time())
                await asyncio.sleep(1.7 if len(times) == 2 else 0.0)
        return times

    assert run(read())[:5] == pytest.approx([1.5, 2.0, 4.0, 4.5, 5.0])


@pytest.mark.parametrize("num_before", [0, 1, 4, 6])
def test_an_error_comes_behind_the_tokens_before_it(num_before: int) -> None:
    async def read() -> list[Delta]:
        collected: list[Delta] = []
        rounds = [(1.0, num_before)] if num_before else []
        with pytest.raises(EngineError, match="broke"):
            await _collect(paced(_made(rounds, error=EngineError("broke")), PACE), collected)
        return collected

    assert sum(len(delta.text_delta.tokens) for delta in run(read())) == num_before


def test_what_a_client_has_of_a_resumed_stream_is_not_delayed() -> None:
    rounds = [(1.0, 5), (0.0, 30)]
    times, deltas = run(_sent(_made(rounds), num_shown=24))
    assert _is_whole(deltas, rounds)
    assert [at_s for at_s, _ in times[:24]] == [1.0] * 24
    assert times[24:] == [(1.5, 4), (2.0, 4), (2.5, 3)]


def test_what_was_made_and_is_not_sent_yet_is_counted() -> None:
    _, deltas = run(_sent(_made([(1.0, 11)])))
    assert [delta.num_buffered for delta in deltas] == [7, 3, 0]


def test_a_client_that_leaves_a_paced_stream_is_charged_what_was_made_ahead() -> None:
    engine = ToyEngine(group=5)
    permit = Permit(key=ANYONE, name="p")
    service = TextService(engine, toy_preparation(pace=PACE))

    async def leave() -> None:
        body = {"prompt": "abc", "max_tokens": 30, "stream": True}
        fields = CompletionFields.model_validate(body)
        events = service.events(await service.prepared(fields, RequestContext(permit=permit)))
        await anext(events)
        await events.aclose()

    run(leave())
    assert (permit.num_prompt_tokens, permit.num_generated_tokens) == (3, 30)
    assert engine.num_live == 0


@contextmanager
def _api(engine: ToyEngine, pace: Pace | None, **options: Any) -> Iterator[str]:
    app = toy_api(engine, max_model_len=MAX_MODEL_LEN, pace=pace, event_key=b"k" * 32, **options)
    with serving(app) as url:
        yield url


def _events(url: str, path: str, body: dict[str, Any], after: str | None = None) -> list[SentEvent]:
    headers = WITH_IDS if after is None else {"Last-Event-ID": after}
    answer = httpx.post(url + path, json={**body, "stream": True}, headers=headers, timeout=20)
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)


@pytest.mark.parametrize(
    ("path", "says", "body"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_the_stream_is_the_same_and_can_be_resumed_at_each_of_its_events(
    api: Api, path: str, says: str | None, body: dict[str, Any]
) -> None:
    if says is not None:
        api.says(says)
    api.engine.group = 5
    body = {**body, "seed": 3, "return_token_origins": True}
    pace = Pace(interval_s=0.001, tokens_per_event=2)
    with (
        _api(api.engine, None, tokenizer=api.tokenizer) as at_once,
        _api(api.engine, pace, tokenizer=api.tokenizer) as url,
    ):
        expected = folded(_events(at_once, path, body))
        whole = _events(url, path, body)
        outcome = folded(whole)
        assert {**outcome, "head": None} == {**expected, "head": None}, "ids are drawn"
        for cut in (i for i, event in enumerate(whole) if event.id):
            suffix = _events(url, path, body, whole[cut].id)
            assert folded(whole[: cut + 1] + suffix) == outcome


def test_a_stop_string_ends_the_engine_before_it_is_sent(api: Api) -> None:
    api.says("a lazy dog and very many words behind it")
    api.engine.group = 4
    pace = Pace(interval_s=0.3, tokens_per_event=1)
    body = {"prompt": "x", "stop": "dog", "max_tokens": 60, "stream": True}
    with (
        _api(api.engine, pace, tokenizer=api.tokenizer) as url,
        httpx.stream("POST", url + COMPLETION, json=body, timeout=20) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        until(lambda: api.engine.aborted)
        assert api.engine.num_live == 0
        text = "".join(lines)
    assert "very" not in text


def test_streams_are_paced_where_the_configuration_says_so() -> None:
    assert _pace_of(StreamsConfig()) is None
    config = StreamsConfig(interval_s=0.25, tokens_per_event=3)
    assert _pace_of(config) == Pace(interval_s=0.25, tokens_per_event=3)
    assert replace(PACE, interval_s=0.25, tokens_per_event=3) == _pace_of(config)
