"""The queue of new grammars: turns of callers, its bounds, and clients that leave."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from eesd_dist.errors import CapacityError, RequestError
from serve_app.openai.work_queues import GrammarQueue


class Work:
    """Compiling that ends when the gate opens; notes in which order it began."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.order: list[str] = []

    def of(self, name: str) -> Callable[[], None]:
        def work() -> None:
            self.order.append(name)
            self.gate.wait(10)

        return work


def played(play: Callable[[GrammarQueue, Work], Awaitable[None]]) -> list[str]:
    work = Work()

    async def run() -> None:
        await play(GrammarQueue(), work)

    asyncio.run(run())
    return work.order


def ask(queue: GrammarQueue, work: Work, name: str, caller: str) -> "asyncio.Task[None]":
    return asyncio.ensure_future(queue.run(work.of(name), caller=caller))


def test_callers_take_turns() -> None:
    async def play(queue: GrammarQueue, work: Work) -> None:
        tasks = [ask(queue, work, f"a{number}", "a") for number in range(6)]
        await asyncio.sleep(0)
        tasks += [ask(queue, work, "b0", "b"), ask(queue, work, "c0", "c")]
        await asyncio.sleep(0)
        work.gate.set()
        await asyncio.gather(*tasks)

    order = played(play)
    assert sorted(order[:2]) == ["a0", "a1"]  # nothing waited before them
    assert set(order[2:5]) == {"a2", "b0", "c0"}


def test_a_client_that_leaves_gives_up_its_turn() -> None:
    async def play(queue: GrammarQueue, work: Work) -> None:
        tasks = [ask(queue, work, f"a{number}", "a") for number in range(5)]
        await asyncio.sleep(0)
        for left in (tasks[0], tasks[3]):  # one is being compiled, one waits
            left.cancel()
        await asyncio.gather(tasks[0], tasks[3], return_exceptions=True)
        tasks.append(ask(queue, work, "b", "b"))
        await asyncio.sleep(0)
        assert "b" not in work.order, "both places are still taken"
        work.gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    order = played(play)
    assert sorted(order) == ["a0", "a1", "a2", "a4", "b"]


def test_a_caller_has_its_share_of_a_full_queue() -> None:
    async def play(queue: GrammarQueue, work: Work) -> None:
        tasks = [ask(queue, work, "a", "a") for _ in range(66)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="64 new grammars of this caller wait"):
            await queue.run(work.of("a"), caller="a")
        tasks += [ask(queue, work, "b", "b") for _ in range(32)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="32 new grammars of this caller wait"):
            await queue.run(work.of("b"), caller="b")
        work.gate.set()
        await asyncio.gather(*tasks)
        await queue.run(work.of("a"), caller="a")

    assert len(played(play)) == 66 + 32 + 1


def test_a_refused_grammar_frees_its_place() -> None:
    def refuse() -> None:
        raise RequestError("wrong")

    async def play(queue: GrammarQueue, work: Work) -> None:
        work.gate.set()
        for _ in range(4):
            with pytest.raises(RequestError, match="wrong"):
                await queue.run(refuse, caller="a")
        await queue.run(work.of("last"), caller="a")

    assert played(play) == ["last"]
