"""The clients of a long run, against the whole API over a toy engine."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from serve_app.bench.chaos.schedule import bodies_of
from tests.endurance.load import Load, References, not_streamed
from tests.endurance.run import references_of
from tests.support.gated_server import gated_server, num_live
from tests.support.running import until

_PROMPTS = [{"prompt": "the quick brown fox"}, {"messages": [{"role": "user", "content": "hi"}]}]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with gated_server() as port:
        yield port


@pytest.fixture(scope="module")
def references(port: int) -> References:
    bodies = bodies_of(_PROMPTS, model="toy", num=8, seed=1, max_tokens=30)
    choices = [not_streamed(body, n=3) for body in bodies[:2]]
    return asyncio.run(references_of(f"http://127.0.0.1:{port}", bodies, choices, concurrency=4))


def num_answers(load: Load) -> int:
    return load.answers.counts.total()


def loaded(port: int, references: References, *, num_requests: int = 150) -> Load:
    async def run() -> Load:
        load = Load(f"http://127.0.0.1:{port}", references, concurrency=4, seed=1)
        is_over = asyncio.Event()
        running = asyncio.create_task(load.run(is_over))
        await asyncio.to_thread(until, lambda: num_answers(load) >= num_requests)
        is_over.set()
        await running
        return load

    return asyncio.run(run())


def test_every_kind_of_request_is_answered_as_before(port: int, references: References) -> None:
    answers = loaded(port, references).answers
    assert answers.wrong == {}, answers.examples
    assert set(answers.counts) == {"stream", "left", "choices", "bad"}
    assert answers.num_tokens > 500


def test_other_tokens_and_texts_than_before_are_noticed(port: int, references: References) -> None:
    streams = [
        (body, replace(streamed, tokens=(streamed.tokens[0] + 1, *streamed.tokens[1:])))
        for body, streamed in references.streams
    ]
    choices = [(body, ("other", *texts[1:])) for body, texts in references.choices]
    answers = loaded(port, References(streams=streams, choices=choices)).answers
    assert answers.wrong["stream: changed"] == answers.counts["stream"] > 0
    assert answers.wrong["left: changed"] > 0
    assert answers.wrong["choices: changed"] == answers.counts["choices"] > 0


def test_a_service_that_is_gone_is_a_wrong_answer_of_every_kind(references: References) -> None:
    answers = loaded(1, references, num_requests=20).answers
    assert answers.wrong.total() == answers.counts.total() > 0


def test_the_service_is_idle_while_the_clients_pause(port: int, references: References) -> None:
    async def run() -> list[int]:
        load = Load(f"http://127.0.0.1:{port}", references, concurrency=4, seed=1)
        is_over = asyncio.Event()
        running = asyncio.create_task(load.run(is_over))
        num_answered: list[int] = []
        for turn in range(1, 4):
            await asyncio.to_thread(until, lambda turn=turn: num_answers(load) >= 20 * turn)
            async with load.paused():
                # The server notices a client that left a moment later.
                await asyncio.to_thread(until, lambda: num_live(port) == 0)
                num_answered.append(num_answers(load))
                await asyncio.sleep(0.1)
                assert num_answers(load) == num_answered[-1]
        is_over.set()
        await running
        return num_answered

    num_answered = asyncio.run(run())
    assert num_answered == sorted(set(num_answered))
