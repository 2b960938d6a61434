"""Random requests among valid ones: the client's errors stay the client's."""

import asyncio
import time
from collections import Counter
from random import Random

import pytest

from tests.support.gated_server import gated_server, num_live
from tests.support.raw_http import exchange
from tests.support.request_fuzzer import FuzzedRequest, fuzzed, valid_request

_AT_ONCE = 16


async def _answers(port: int, requests: list[FuzzedRequest]) -> Counter[int | None]:
    """Sends all; returns how often each status came back. Raises TimeoutError for a stuck one."""
    statuses: Counter[int | None] = Counter()
    left = iter(requests)

    async def send_some() -> None:
        for request in left:
            try:
                reply = await exchange(port, *request.parts, leaves=request.leaves, timeout_s=30.0)
            except TimeoutError as error:
                raise AssertionError(f"stuck: {request}") from error
            statuses[reply.status] += 1
            assert reply.status is None or reply.status < 500, (request, reply.raw)
            if request.is_valid:
                assert reply.status == 200, (request, reply.raw)

    async with asyncio.TaskGroup() as clients:
        for _ in range(_AT_ONCE):
            clients.create_task(send_some())
    return statuses


def _fuzz(number: int, *, seed: int) -> Counter[int | None]:
    rng = Random(seed)
    requests = [fuzzed(rng) for _ in range(number)]
    with gated_server(read_timeout_s=1.0, head_timeout_s=1.0) as port:
        statuses = asyncio.run(_answers(port, requests))
        deadline_s = time.monotonic() + 10.0
        while num_live(port) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert num_live(port) == 0
        assert asyncio.run(exchange(port, valid_request(rng))).status == 200
    return statuses


def test_no_request_breaks_the_service_or_stays_in_it() -> None:
    statuses = _fuzz(200, seed=11)
    assert statuses[200] > 40
    assert statuses[400] > 20
    assert statuses[408] > 2


@pytest.mark.slow
def test_five_thousand_requests_leave_nothing_behind() -> None:
    statuses = _fuzz(5000, seed=12)
    assert statuses[200] > 1000
    assert statuses[400] > 500
    assert statuses[408] > 50
