"""Sends random requests to a server while another client pings it, and checks every answer."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from random import Random

from tests.support.raw_http import Reply, exchange, get
from tests.support.request_fuzzer import FuzzedRequest, fuzzed

_PING_EVERY_S = 0.05
_NUM_ASKED_AGAIN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzing:
    """What came back."""

    statuses: Counter[int | None]
    pings_s: list[float]
    """Seconds of each ping, in rising order."""
    num_same: int
    """Texts that were compared, with the same request sent again alone."""

    def __str__(self) -> str:
        found = ", ".join(
            f"{num} {status}" for status, num in sorted(self.statuses.items(), key=str)
        )
        p99_s = self.pings_s[int(0.99 * len(self.pings_s))]
        return (
            f"answers: {found}; {self.num_same} texts compared; {len(self.pings_s)} pings: "
            f"p99 {1e3 * p99_s:.0f} ms, max {1e3 * self.pings_s[-1]:.0f} ms"
        )


async def fuzz(
    port: int, number: int, *, seed: int, num_pings: int, at_once: int = 16, timeout_s: float = 30.0
) -> Fuzzing:
    """Raises AssertionError for an answer that is wrong, or that does not come."""
    rng = Random(seed)
    requests = [fuzzed(rng) for _ in range(number)]
    replies: list[tuple[FuzzedRequest, Reply]] = []
    left = iter(requests)

    async def send_some() -> None:
        for request in left:
            reply = await _answer(port, request, timeout_s=timeout_s)
            replies.append((request, reply))

    is_over = asyncio.Event()
    pinging = asyncio.create_task(_pings(port, num_pings, until=is_over))
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(send_some())
    finally:
        is_over.set()
    pings_s = await pinging
    return Fuzzing(
        statuses=Counter(reply.status for _, reply in replies),
        pings_s=sorted(pings_s),
        num_same=await _num_same(port, replies, timeout_s=timeout_s),
    )


async def _answer(port: int, request: FuzzedRequest, *, timeout_s: float) -> Reply:
    try:
        reply = await exchange(port, *request.parts, leaves=request.leaves, timeout_s=timeout_s)
    except TimeoutError as error:
        raise AssertionError(f"stuck: {request}") from error
    assert reply.status is None or reply.status < 500, (request, reply.raw)
    if request.whole is not None:
        assert reply.status == 200, (request, reply.raw)
    return reply


async def _num_same(
    port: int, replies: list[tuple[FuzzedRequest, Reply]], *, timeout_s: float
) -> int:
    """Sends the first valid requests again, one after the other."""
    texts = [(request.whole, reply.texts) for request, reply in replies if request.whole]
    asked = [(whole, found) for whole, found in texts if found][:_NUM_ASKED_AGAIN]
    for whole, found in asked:
        again = (await exchange(port, whole, timeout_s=timeout_s)).texts
        assert found == again, whole
    return len(asked)


async def _pings(port: int, at_least: int, *, until: asyncio.Event) -> list[float]:
    seconds: list[float] = []
    while not until.is_set() or len(seconds) < at_least:
        reply = await exchange(port, get("/ping"))
        assert reply.status == 200, reply.raw
        seconds.append(reply.took_s)
        await asyncio.sleep(_PING_EVERY_S)
    return seconds
